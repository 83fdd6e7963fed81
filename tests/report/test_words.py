"""Printed lines: one way of counting, short, and each kind of incident once."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from keras_nanguard import Decision, Diagnosis, Finding, Incident, Outcome
from keras_nanguard._core.literals import CAUSES
from keras_nanguard._fit.log import GuardLog
from keras_nanguard._recording.recording import BadSample
from keras_nanguard._report.console import brief_line

WARN = Decision("tell", ({"action": "warn"},), "tell: 1 in a row.")
DIAGNOSIS = Diagnosis("input_nonfinite", "inputs/age", (12,), ("Seen one.", "Seen two."), ("Clean it.",), 0.95)
SKIPPED = Outcome("skip", "done", "the step was skipped")


FOUND = (Finding("inputs", path="x/age", nan=1, inf=0, size=32),)


def incident(step=5, epoch=0, batch=5, findings=FOUND, **fields):
    return Incident(step, epoch, batch, findings, **{"decision": WARN, "outcomes": (SKIPPED,), **fields})


@pytest.mark.parametrize(
    ("given", "moment"),
    [
        (incident(517, 2, 17), "step 518 (epoch 3, batch 18)"),
        (incident(0, 0, 0, replicas=(1,)), "step 1 (epoch 1, batch 1, replica 1)"),
        (incident(findings=(Finding("loss", "spike"),), refused=False), "step 6 (epoch 1, batch 6)"),
        (incident(0, 0, 0, (Finding("state"),), refused=False), "before the first step"),
        (incident(0, 0, 0, (Finding("predictions"),), refused=False, decision=None), "in predict"),
        (incident(0, 0, 0, (Finding("statistics"), Finding("validation")), refused=False, decision=None), "in evaluate"),
        (incident(9, 1, 4, (Finding("validation", path="loss"),), refused=False), "in the validation of epoch 2"),
    ],
)
def test_when(given, moment):
    """Steps, epochs and batches count from 1; a result belongs to its call, not to a step."""
    assert given.moment == moment
    assert str(given).startswith(f"{moment} refused: " if given.refused else f"{moment}: ")


NOT_DONE = Outcome("rollback", "skipped", "there is no verified snapshot to restore")
SLOWER = Outcome("lower_lr", "done", "learning rate 3 -> 0.3")
ROW = BadSample("x[700]", 700, "f00d", 1, (5,), "NaN")
NAMED = BadSample("cat.png", 700, "f00d", 1, (5,), "NaN")
DETAILS = 'guard.report("run.html")'
LONG = "functional_12/residual_block_3/batch_normalization_17/moving_variance"


@pytest.mark.parametrize(
    ("given", "samples", "line"),
    [
        (
            incident(diagnosis=replace(DIAGNOSIS, culprit="inputs")),
            [ROW],
            "skipped step 6 (epoch 1): NaN in x[700]. Clean 'x'. Details: guard.report(\"run.html\")",
        ),
        (
            incident(diagnosis=DIAGNOSIS),
            [ROW, replace(ROW, label="x[3]", index=3)],
            "skipped step 6 (epoch 1): NaN in x/age[700] and 1 more row. Clean 'x/age'. Details: "
            + DETAILS,
        ),
        (
            incident(diagnosis=DIAGNOSIS),
            [NAMED],
            "skipped step 6 (epoch 1): NaN in 'x/age' of cat.png. Clean 'x/age'. Details: " + DETAILS,
        ),
        (
            incident(diagnosis=replace(DIAGNOSIS, samples=(12, 13, 14))),
            [],
            "skipped step 6 (epoch 1): NaN in 'x/age', row 12 of the batch and 2 more rows. "
            "Clean 'x/age'.",
        ),
        (
            incident(diagnosis=Diagnosis("loss_domain", "mse"), outcomes=(Outcome("stop", "done"),)),
            [],
            "stopped at step 6 (epoch 1): NaN from the loss 'mse'. Details: " + DETAILS,
        ),
        (
            incident(
                diagnosis=Diagnosis("divergence", "mse"),
                outcomes=(Outcome("rollback", "done", "back"), SLOWER),
                replicas=(1,),
            ),
            [],
            "rolled back at step 6 (epoch 1, replica 1): training diverged; "
            "learning rate 3 -> 0.3.",
        ),
        (
            incident(findings=(Finding("loss", "spike", value=3.0),), refused=False),
            [],
            "step 6 (epoch 1): loss: spike (3). Details: " + DETAILS,
        ),
        (
            incident(outcomes=(NOT_DONE, Outcome("warn", "done", "look at the sensors"))),
            [],
            "skipped step 6 (epoch 1): NaN in inputs x/age; no rollback; look at the sensors.",
        ),
        (
            incident(diagnosis=Diagnosis("input_scale", "inputs", (12,))),
            [ROW],
            "skipped step 6 (epoch 1): huge values in x[700]. Check it. "
            "Details: " + DETAILS,
        ),
        (
            incident(
                findings=(Finding("targets", "out_of_range", value=7.0),),
                diagnosis=Diagnosis("target_out_of_range", "cce", (1,)),
                decision=None,
                outcomes=(),
            ),
            [],
            "error in step 6 (epoch 1): 'cce', row 1 of the batch out of range of the loss. Check 'cce'.",
        ),
        (
            incident(
                diagnosis=Diagnosis("optimizer_domain", "AdamW/learning_rate"),
                values={"pole": 60.0, "learning_rate": math.inf},
            ),
            [],
            "skipped step 6 (epoch 1): the learning rate was inf at iteration 60. "
            "Details: " + DETAILS,
        ),
    ],
)
def test_brief_line(given, samples, line):
    """The line of a run starts with action and reason, and has at most 120 characters."""
    assert brief_line(given, samples, DETAILS) == f"NanGuard: {line}"
    assert len(line) <= 110


@pytest.mark.parametrize("cause", CAUSES)
def test_brief_lines_of_all_causes_fit(cause):
    long = Diagnosis(cause, LONG, (3, 4), ("Seen. " * 40,), ("Do. " * 60,))
    outcomes = tuple(Outcome(action, "done", "detail " * 30) for action in ("rollback", "lower_lr", "clip"))
    found = (Finding("weights", path=LONG * 3, nan=3, inf=1, size=9),)
    for samples in ([], [replace(ROW, label="name " * 40)]):
        for given in (incident(diagnosis=long, outcomes=outcomes), incident(findings=found)):
            line = brief_line(given, samples, "keras-nanguard report " + "folder/" * 20)
            assert line.startswith("NanGuard: ") and len(line) <= 120


class Printed(GuardLog):
    """Returns the lines that it prints."""

    def __init__(self):
        super().__init__(1, None)
        self.lines = []
        self.line = self.lines.append

    def printed(self):
        """Return the lines since the last call, joined."""
        found = "\n".join(filter(None, self.lines))
        self.lines.clear()
        return found

    def of(self, one):
        self.announce(one)
        return self.printed()

    def of_epoch(self, epoch, refused, committed, unmeasured=()):
        counts = {"epoch_refused": refused, "epoch_committed": committed, "epoch_overflows": 0}
        self.epoch(SimpleNamespace(**counts), epoch, unmeasured, True)
        return self.printed()


class TestLines:

    def test_other_rows_of_the_same_kind(self):
        """One cause in one place is one kind, for any rows and any first finding."""
        lines = Printed()
        found = [incident(diagnosis=DIAGNOSIS), incident(findings=(Finding("loss"),), diagnosis=replace(DIAGNOSIS, samples=(3,)))]
        assert [bool(lines.of(one)) for one in found] == [True, False]

    def test_changes_are_always_printed(self):
        """All that change the run or are outside of training have a line; mere warnings do not."""
        back, kept = ((Outcome(action, "done", "so"),) for action in ("rollback", "warn"))
        for fields in ({"outcomes": back}, {"decision": None, "outcomes": ()}):
            lines = Printed()
            assert all(lines.of(incident(step, 0, step, **fields)) for step in range(30))
        lines = Printed()
        assert sum(bool(lines.of(incident(step, 0, step, outcomes=kept))) for step in range(9)) == 1

    def test_round_numbers(self):
        """In a loop without epochs the 10th, 100th and 1000th of a kind, with this number."""
        lines = Printed()
        reported = {n: line for n in range(1, 1001) if (line := lines.of(incident(n, 0, n)))}
        assert list(reported) == [1, 10, 100, 1000] and " 100th incident of this kind." in reported[100]

    def test_epochs(self):
        """The first with refused steps, or with twice those of the last line, or with no other."""
        lines = Printed()
        reported = [bool(lines.of_epoch(epoch, refused, 40)) for epoch, refused in enumerate((0, 5, 5, 4, 9, 10, 11, 0))]
        assert reported == [False, True, False, False, False, True, False, False]
        assert lines.of_epoch(8, 3, 0, ["loss"]) and lines.of_epoch(9, 3, 0, ["loss"])
