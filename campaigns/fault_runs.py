"""Runs the faults of one configuration, with one compiled model, and its undisturbed runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from campaigns import fault_models, fault_plan
from campaigns.fault_models import BATCH, MODES, Configuration
from campaigns.fault_plan import Fault
from keras_nanguard import NanGuard
from keras_nanguard.testing import Injection, inject

__all__ = ["SLOT", "Bench", "begin", "finite", "run"]

SLOT = 1000
"""Steps between the faults of one injection: each has its own run, which begins at a multiple of
this.
"""

WARM_UP, MORE = 4, {"RNN": 16}
"""Epochs of training before every run, and for models that learn slowly."""

SLOWER = 0.2
"""Factor of the learning rate of the warm-up: with it one batch changes accuracy by less than a
point.
"""

SEEDED = ("MLP", "GAN", "VAE")
"""Models that draw random numbers while they train."""

Arrays = list[np.ndarray[Any, Any]]
Row = dict[str, Any]


class Bench:
    """One compiled model, the state from which all of its runs begin, and its undisturbed runs.

    Args:
        configuration: the model, and how it is trained.
        steps: the length of a run.

    Attributes:
        healthy: a row for each undisturbed run with a guard.
        program: the compiled step of the next runs: `stock`, `guarded` or `injected`.
    """

    def __init__(self, configuration: Configuration, steps: int):
        self.c, self.steps, self.program = configuration, steps, "stock"
        x, y, self.held_out, self.labels = fault_models.digits()
        all_of_y = fault_models.targets(self.c.model, x, y)
        self.x, self.y = x[: steps * BATCH], keras.tree.map_structure(lambda a: a[: steps * BATCH], all_of_y)
        self.model = fault_models.build(configuration)
        self.healthy: list[Row] = []
        self._ends: dict[Any, tuple[Arrays, float]] = {}
        self._all, self.start = (x, all_of_y), Arrays()

    def warm_up(self) -> None:
        """Train for some epochs, and store the state from which every run begins."""
        for _ in range(MORE.get(self.c.model, WARM_UP)):
            self.train(*self._all)
        known = [(v.path, keras.ops.convert_to_numpy(v.value)) for v in variables(self.model)]
        self.start = [value * SLOWER if path.endswith("/learning_rate") else value for path, value in known]

    def train(self, x: Any, y: Any, *callbacks: Any, key: Any = "warm-up") -> None:
        """Train on data without faults; with a guard, except in the program `stock`."""
        guard = NanGuard(verbose=0)
        self.fit(x, y, *callbacks, *([] if self.program == "stock" else [guard]))
        if self.program != "stock":
            said, session = [str(incident) for incident in guard.incidents], guard.session
            refused = session.run.counts.refused - session.run.counts.overflows
            self.healthy.append({"healthy": repr(key), "steps": session.run.step, "refused": refused, "incidents": said})

    # One run

    def fit(self, x: Any, y: Any, *callbacks: Any) -> None:
        """Train on these batches, in their order."""
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)  # that of Keras takes longer than all steps
            self.model.fit(data, verbose=0, callbacks=list(callbacks))
        else:
            self.model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))

    def put_back(self) -> None:
        """Restore the state from which every run begins."""
        keras.utils.set_random_seed(1)
        for variable, value in zip(variables(self.model), self.start):
            variable.assign(value)

    def end(self) -> tuple[Arrays, float]:
        """Return the state, and the accuracy on held-out digits."""
        state = [np.array(keras.ops.convert_to_numpy(v.value)) for v in variables(self.model)]
        if (drawn := _generator()) is not None:
            state.append(drawn.numpy())
        return state, fault_models.accuracy(self.model, self.held_out, self.labels)

    def batches(self, first: int = 0, last: int | None = None, without: Sequence[int] = ()) -> tuple[Any, Any]:
        """Return the data of some of the steps."""
        steps = [s for s in range(first, self.steps if last is None else last) if s not in without]
        rows = np.concatenate([np.arange(s * BATCH, (s + 1) * BATCH) for s in steps]) if steps else np.arange(0)
        return self.x[rows], keras.tree.map_structure(lambda a: a[rows], self.y)

    # Undisturbed runs

    def undisturbed(self, *parts: tuple[Any, Any], between: Callable[[], None] = lambda: None, key: Any = None) -> tuple[Arrays, float]:
        """Return the result of a run without faults, made once for each key; with a guard, except
        in the program `stock`.
        """
        key = (self.program, key)
        if key not in self._ends:
            self.put_back()
            go_on = [GoOn()] if len(parts) > 1 else []
            for number, (x, y) in enumerate(parts):
                if number:
                    between()
                if len(x):
                    self.train(x, y, *go_on, key=key)
            self._ends[key] = self.end()
        return self._ends[key]

    def whole(self) -> tuple[Arrays, float]:
        """Return the result of the run with every batch."""
        return self.undisturbed(self.batches(), key="whole")

    def stock(self) -> tuple[Arrays, float]:
        """Return its result without a guard."""
        return self._ends["stock", "whole"]

    def without(self, *steps: int) -> tuple[Arrays, float]:
        """Return the result of the run without the batches of some steps."""
        return self.undisturbed(self.batches(without=steps), key=("without", *sorted(steps)))

    def since(self, step: int) -> tuple[Arrays, float]:
        """Return the result of the run that begins with a later step."""
        return self.undisturbed(self.batches(first=step), key=("since", step))

    def scaled(self, step: int, ended: Arrays) -> tuple[Arrays, float]:
        """Return the result of the run without the batch of one step, with the loss scale of
        another run from there on.
        """
        names = [v.path.rpartition("/")[2] for v in variables(self.model)]
        scale, counter = names.index("dynamic_scale"), names.index("step_counter")
        value, count = ended[scale], ended[counter] - (self.steps - 1 - step)

        def between() -> None:
            known = variables(self.model)
            known[scale].assign(value)
            known[counter].assign(count)

        parts = (self.batches(last=step), self.batches(first=step + 1))
        return self.undisturbed(*parts, between=between, key=("scaled", step, float(value), int(count)))

    def trained(self, ended: Arrays) -> Arrays:
        """Return the arrays of the train state; a metric of a finite loss of 1e38 adds up to Inf."""
        metrics = {id(v) for v in self.model.metrics_variables}
        return [a for v, a in zip(variables(self.model), ended) if id(v) not in metrics]

    def has_other_scale(self, ended: Arrays) -> bool:
        """Whether the loss scale has changed in a run."""
        known = zip(variables(self.model), ended, self.start)
        return any(a != b for v, a, b in known if v.path.endswith("/dynamic_scale"))

    def same(self, ended: Arrays, as_in: Arrays, leaving_out: tuple[str, ...] = ()) -> bool:
        """Whether two runs end with the same bits, except in variables whose paths contain certain
        words.
        """
        names = [*(v.path for v in variables(self.model)), "generator"]
        pairs = [(a, b) for name, a, b in zip(names, ended, as_in) if not any(word in name for word in leaving_out)]
        return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def variables(model: Any) -> list[Any]:
    """Return every variable of the train state of a model, each once."""
    found = [*model.variables, *model.metrics_variables, *(v for o in optimizers(model) for v in o.variables)]
    return list({id(v): v for v in found}.values())


def optimizers(model: Any) -> list[Any]:
    return [o for o in (model.optimizer, getattr(model, "second", None)) if o is not None]


def targets_of(model: Any, fault: Fault) -> tuple[Any, int]:
    """Return the variable in which a bit flips, and its entry."""
    groups = {
        "weights": model.trainable_variables,
        "slots": [v for o in optimizers(model) for v in o.variables if len(v.shape) and keras.backend.is_float_dtype(v.dtype)],
        "statistics": [v for v in model.non_trainable_variables if "moving_" in v.path],
    }
    found = groups[fault.site]
    variable = found[int(fault.place[0] * len(found))]
    return variable, int(fault.place[1] * int(np.prod(variable.shape)))


class GoOn(keras.callbacks.Callback):
    """Continues with the random numbers of the previous fit: on PyTorch Keras draws some when the
    data begin and end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0 and self.drawn is not None:
            import torch

            torch.set_rng_state(self.drawn)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.drawn = _generator()


def _generator() -> Any:
    """Return the state of the generator that belongs to no variable, `None` if there is none."""
    if keras.backend.backend() != "torch":
        return None
    import torch

    return torch.get_rng_state().clone()


class Flip(keras.callbacks.Callback):
    """Flips one bit of the state before a step."""

    def __init__(self, fault: Fault):
        super().__init__()
        self.fault = fault

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self.fault.step:
            variable, entry = targets_of(self.model, self.fault)
            variable.assign(fault_plan.flipped(keras.ops.convert_to_numpy(variable.value), entry, self.fault.bit))


class Look(keras.callbacks.Callback):
    """Records the values that flipped bits will give, in a run in which no bit flips."""

    def __init__(self, faults: list[Fault]):
        super().__init__()
        self.faults, self.becomes = faults, dict[int, tuple[str, str]]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for fault in self.faults:
            if fault.step == batch:
                variable, entry = targets_of(self.model, fault)
                value = np.array(keras.ops.convert_to_numpy(variable.value))
                after = fault_plan.flipped(value, entry, fault.bit)
                self.becomes[fault.number] = fault_plan.judged(value, after.reshape(-1)[entry : entry + 1]), variable.path


# The faults of one configuration


def spoiled(bench: Bench, faults: Sequence[Fault]) -> tuple[Any, Any]:
    """Return the data with faults in some batches."""
    x, y = bench.batches()
    y = keras.tree.map_structure(np.array, y)
    values = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "overflow": np.finfo("float32").max}
    for fault in faults:
        array = x if fault.site == "inputs" else y["digit"] if isinstance(y, dict) else y
        array[fault.step * BATCH + fault.row, : fault.entries] = values[fault.kind]
    return x, y


def run(c: Configuration, count: int, steps: int, done: frozenset[int] = frozenset()) -> Iterator[Row]:
    """Yield a row for each fault of a configuration that has no result yet, and one for each
    healthy run.
    """
    has = (["statistics"] if c.model == "CNN+BN" else []) + (["loss_scale"] if c.precision == "mixed_float16" else [])
    together = MODES[c.backend][c.mode].get("steps_per_execution", 1)
    ways, with_stock = c.ways, c.with_stock
    earliest = 1 if c.backend == "jax" else 0  # there `inject` writes before the guard first checks the state
    at_once = 1 if c.backend == "jax" else together  # JAX guards and replays each step of an execution separately
    faults = fault_plan.plan(c.name, count, steps, BATCH, c.precision, has, together, ways, with_stock, earliest)
    if all(fault.number in done for fault in faults):
        return
    bench, ruined = Bench(c, steps), dict[int, bool]()
    if with_stock:
        bench.warm_up()
        bench.whole()
        ruined = {f.number: _ruins(bench, f) for f in faults if (f.site, f.kind) in fault_plan.FINITE}
    for program, made in (("guarded", ("data", "flip")), ("injected", ("inject",))):
        bench.program, mine = program, [f for f in faults if f.way in made]
        if not mine:
            continue
        with contextlib.ExitStack() as stack:
            hooks = {f.hook: _hook(bench, f, mine, stack) for f in {f.hook: f for f in mine if f.hook >= 0}.values()}
            begin(hooks, 0)
            if not bench.start:
                bench.warm_up()
            flips = Look([f for f in mine if f.way == "flip"])
            bench.put_back()
            bench.train(*bench.batches(), flips, key="look")
            if program == "guarded" and with_stock:
                yield {**asdict(c), "twin": True, "same": bench.same(bench.whole()[0], bench.stock()[0])}
            for number in dict.fromkeys(f.run for f in mine):
                share = [f for f in mine if f.run == number]
                if not done.issuperset(f.number for f in share):
                    ended = _disturbed(bench, share, hooks)
                    alone = len(share) > 1 and program == "guarded" and bench.has_other_scale(ended.state)
                    for fault in share:
                        ended = _disturbed(bench, [fault], hooks) if alone else ended
                        becomes, path = flips.becomes.get(fault.number, ("", fault.path))
                        expected = fault_plan.expected(fault, c.precision, becomes, ruined.get(fault.number, True))
                        yield {**asdict(c), **asdict(fault), **_judged(bench, fault, ended, expected, becomes, path, at_once)}
    yield from ({**asdict(c), **row} for row in bench.healthy)


def _ruins(bench: Bench, fault: Fault) -> bool:
    """Whether stock Keras ends with NaN or Inf, or with an error, because of a finite number in the
    batch.
    """
    bench.put_back()
    try:
        bench.fit(*spoiled(bench, [fault]))
    except RuntimeError:  # PyTorch's binary_cross_entropy rejects NaN
        return True
    return not finite(bench.end()[0])


def finite(state: Arrays) -> bool:
    floats = [np.asarray(a, "float64") for a in state if a.dtype.kind not in "iub"]
    return all(bool(np.isfinite(a).all()) for a in floats)


def _hook(bench: Bench, fault: Fault, faults: list[Fault], stack: contextlib.ExitStack) -> Injection:
    """Enter the injection that makes a fault, and all others that share it."""
    steps = [SLOT * (f.run + 1) + f.step for f in faults if f.hook == fault.hook]
    given = {"site": fault.site, "kind": fault.kind, "rows": fault.row, "entries": fault.entries, "path": fault.path}
    return stack.enter_context(inject(bench.model, step=steps, require_fired=False, **given))


def begin(hooks: dict[int, Injection], step: int) -> None:
    """Let every injection count its steps from this one."""
    for injection in hooks.values():
        hook = injection._hook
        if hasattr(hook, "counter"):
            hook.counter.assign(step - 1)
        else:
            hook.seen = step


@dataclass(frozen=True)
class Ended:
    """The result of a disturbed run."""

    share: tuple[Fault, ...]
    guard: NanGuard
    state: Arrays
    accuracy: float
    error: str
    seconds: float


def _disturbed(bench: Bench, share: list[Fault], hooks: dict[int, Injection]) -> Ended:
    """Run the faults that share a run."""
    guard, cpu, error = NanGuard(verbose=0), time.process_time(), ""
    bench.put_back()
    begin(hooks, SLOT * (share[0].run + 1))
    x, y = spoiled(bench, [f for f in share if f.way == "data"])
    try:
        bench.fit(x, y, *(Flip(f) for f in share if f.way == "flip"), guard)
    except Exception as caught:  # noqa: BLE001  a run that raises is a result
        error = f"{type(caught).__name__}: {caught}"[:300]
    state, accuracy = bench.end()
    begin(hooks, 0)
    return Ended(tuple(share), guard, state, accuracy, error, (time.process_time() - cpu) / len(share))


def _judged(bench: Bench, fault: Fault, ended: Ended, expected: str, becomes: str, path: str, together: int) -> Row:
    """Return the result of one fault: whether it was detected, and whether the run ended like one
    without it.
    """
    session = ended.guard.session
    others = {f.step for f in ended.share} - {fault.step}
    incidents = [i for i in ended.guard.incidents if i.step not in others]
    mine = [i for i in incidents if i.step == fault.step]
    first = next(iter([*mine, *incidents]), None)
    named = {i.diagnosis.cause for i in mine or incidents if i.diagnosis is not None}
    diagnosis = first.diagnosis if first is not None else None
    counted = expected in ("overflow", "either") and session.run.counts.overflows == 1 and not incidents
    compared = expected != "may" or (bool(mine) and fault.way != "flip")
    oracle = fault_plan.repairs(fault, bench.c.precision, together, becomes) if compared else ""
    if oracle == "without" and bench.has_other_scale(ended.state):
        oracle = "scaled" if len(ended.share) == 1 else ""
    return {
        "expected": expected,
        "becomes": becomes,
        "seen": counted or (bool(mine) and expected != "overflow"),
        "late": None if first is None else first.step - fault.step,
        "incidents": [str(i) for i in incidents],
        "refused": session.run.counts.refused,
        "oracle": oracle,
        **_identical(bench, fault, oracle, ended, together),
        "cause": "" if diagnosis is None else diagnosis.cause,
        "right": None if first is None else not named.isdisjoint(fault_plan.causes(fault, bench.c.precision, becomes)),
        "place": "" if diagnosis is None else _placed(fault, path, diagnosis),
        "named": "" if diagnosis is None else f"{diagnosis.culprit} {diagnosis.samples}",
        "path": path,
        "finite": finite(bench.trained(ended.state)),
        "stopped": session.run.stopped,
        "accuracy": ended.accuracy,
        "undisturbed": bench.whole()[1],
        "error": ended.error,
        "seconds": round(ended.seconds, 2),
    }


def _identical(bench: Bench, fault: Fault, oracle: str, run: Ended, together: int) -> Row:
    """Return whether a run has ended with the bits of an undisturbed one, and of which one; `None`
    if unknown.
    """
    ended = run.state
    if oracle == "without":
        return {"identical": bench.same(ended, bench.without(*(f.step for f in run.share))[0]), "as": "without"}
    if oracle == "scaled":
        once_a_fit = (*(v.path for v in bench.model.metrics_variables), "generator")  # that run consists of two
        return {"identical": bench.same(ended, bench.scaled(fault.step, ended)[0], once_a_fit), "as": "scaled"}
    if oracle in ("again", "either"):
        if bench.same(ended, bench.whole()[0]):
            return {"identical": True, "as": "again"}
        return {"identical": oracle == "either" and bench.same(ended, bench.without(fault.step)[0]), "as": "without"}
    if oracle == "since" and bench.c.model not in SEEDED:
        then = (fault.step // together + 1) * together
        leaving_out = (*(v.path for v in bench.model.metrics_variables), "dynamic_scale", "step_counter", "seed", "generator")
        return {"identical": bench.same(ended, bench.since(then)[0], leaving_out), "as": "since"}
    return {"identical": None, "as": ""}


def _placed(fault: Fault, path: str, diagnosis: Any) -> str:
    """Return whether a diagnosis names the row or variable of a fault: `right`, `wrong`, `none`, or
    `""` if there is none to name.
    """
    named = str(diagnosis.culprit)
    if fault.site in ("inputs", "targets"):
        return ("right" if tuple(diagnosis.samples) == (fault.row,) else "wrong") if diagnosis.samples else "none"
    if fault.way != "flip":
        return ""
    of_weight = fault.site == "slots" and named.replace("/", "_") in path.replace("/", "_")
    return ("right" if named == path or of_weight else "wrong") if named else "none"
