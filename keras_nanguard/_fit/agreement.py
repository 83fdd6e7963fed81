"""One decision in several processes: which facts they exchange, and what each derives from them.

A step reports in one message whether any process has a finding. Only then more is exchanged, always
by all processes and in the same order:

    findings    of each process, with the rows of a bad batch
    diagnosis   of each process, from its own batch and state
    outcomes    whether each action was done on all of them

Each result is a pure function of these facts, so every process has the same incident, decision and
budgets. A process that trains alone exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._core.data import ARGUMENTS, argument_path, named
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.incident import Diagnosis, Finding, Outcome
from keras_nanguard._core.json_records import stored
from keras_nanguard._core.literals import NAMES_DATA, SITES, causes_with
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.snapshots import Ring, Snapshot
from keras_nanguard._fit.steps import Rerun
from keras_nanguard._keras import arrays as keras_arrays

MAX_ROWS, MAX_SAMPLES, MAX_TEXT = 8, 64, 250
"""Limits in a message: rows in a path, samples of a diagnosis, characters of an outcome."""

OF_ITS_OWN = ("inputs", "targets", "state", "outputs", "loss", "statistics")
"""Sites that each process has separately; gradients, weights and slots are common to all."""


class Agreement:
    """The decisions of a process, with those that it trains with.

    Args:
        together: whether other processes take part. If not, nothing is exchanged.

    Attributes:
        count, rank: number of processes, and number of this one, from 0.
        news: whether any process has findings between two steps, according to the last step.
    """

    def __init__(self, together: bool = False):
        self.rank, self.count = (processes.index(), processes.count()) if together else (0, 1)
        self.news = False
        self._kept: list[Finding] = []

    def _exchange(self, value: Any, what: str) -> list[Any]:
        return [value] if self.count == 1 else processes.exchange(value, what)

    def hear(self, news: bool) -> None:
        """Note whether any process has findings between two steps, according to this step."""
        self.news = news

    @property
    def has_news(self) -> bool:
        """Whether this process has stored findings that it has not yet shared with the others."""
        return bool(self._kept)

    def all_see(self, verdict: Verdict) -> bool:
        """Return whether a verdict is the same in all processes.

        It is not if NaN is in the copy that one process has of a weight or slot that all hold. The
        next loss, which is computed by all of them, shows it to the others.
        """
        common = verdict.loss + verdict.gradients + verdict.statistics
        shown = verdict.refused or verdict.finite or not isfinite(common)
        shown = shown or not verdict.scale_is_valid
        return self.count == 1 or shown or not current.host().SPREADS_ARRAYS

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process."""
        return tuple(map(any, zip(*self._exchange(flags, "the findings of a step"))))

    def between_steps(self, findings: list[Finding]) -> list[Finding]:
        """Return findings between two steps if all processes have them; else store them."""
        if self.count == 1 or current.host().SPREADS_ARRAYS:  # all have read the same numbers
            return findings
        self._kept += [finding for finding in findings if finding not in self._kept]
        return []

    def pick_up(self) -> list[Finding]:
        """Return the stored findings, once all processes have them."""
        self.news = False
        findings, self._kept = self._kept, []
        return findings

    def findings(
        self, findings: Sequence[Finding], report: Report | None, names: tuple[str, ...]
    ) -> list[Finding]:
        """Return the findings of all processes in a step.

        Args:
            report: the report with the batch of this process.
            names: the names of the inputs of the model, as in the paths of the findings.
        """
        if self.count == 1:
            return list(findings)
        own = [asdict(finding) for finding in _with_rows(findings, report, names, self.rank)]
        messages = self._exchange(own, "the findings of a step")
        return united([[Finding(**f) for f in message] for message in messages])

    def diagnosis(
        self, own: Diagnosis | None, sites: Container[str], report: Report | None
    ) -> tuple[Diagnosis | None, bool]:
        """Return the diagnosis of the best informed process, and whether its rows belong to the
        batch of this one.

        Args:
            own: the diagnosis of this process.
            sites: the sites of the findings of this process.
            report: the report with the batch of this process.
        """
        if self.count == 1:
            return own, True
        separate = [site for site in OF_ITS_OWN if site in sites]
        few = None if own is None else replace(own, samples=own.samples[:MAX_SAMPLES])
        message = [separate[:1], few and asdict(few)]
        messages = self._exchange(message, "the diagnosis of a step")
        rank = informed([(site, (given or {}).get("cause")) for site, given in messages])
        spreads, given = current.host().SPREADS_ARRAYS, messages[rank][1]
        ours = rank == self.rank or spreads  # all read a spread batch
        if given is None:
            return own, ours
        chosen = stored(Diagnosis, given)
        if chosen.samples:
            rows: Mapping[int, Sequence[int]] = {rank: chosen.samples}
            if spreads and report is not None:
                rows = _by_process(report, chosen.samples, rank)
            of_batch = chosen.cause in NAMES_DATA | causes_with("batch")
            place = _located(chosen.culprit_shown if of_batch else "batch", rows)
            chosen = replace(chosen, evidence=(f"{place}.", *chosen.evidence))
        return chosen, ours

    def outcomes(self, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """Return the outcomes of the actions on all processes.

        Raises:
            GuardError: if an action was done on some of them only.
        """
        if self.count == 1:
            return outcomes
        own = [[o.status, o.detail[:MAX_TEXT]] for o in outcomes]
        messages = self._exchange(own, "the outcomes of the actions")
        for number, outcome in enumerate(outcomes):
            done = [message[number][0] == "done" for message in messages]
            if any(done) and not all(done):
                rank, other = done.index(True), done.index(False)
                reason = messages[other][number][1]
                received = f"done on rank {rank}, and not on rank {other}: {reason}"
                what = f"{outcome.action} on all processes"
                remedy = "Restart them from a checkpoint."
                raise GuardError(expected(what, received, remedy))
        return tuple(replace(o, detail=detail) for o, (_, detail) in zip(outcomes, messages[0]))

    def snapshot(self, snapshot: Snapshot | None, ring: Ring) -> Snapshot | None:
        """Return the snapshot to restore, which all processes have; `None` if there is none."""
        if self.count == 1:
            return snapshot
        steps = self._exchange(-1 if snapshot is None else snapshot.step, "the snapshot to restore")
        known = (*ring.snapshots, *ring.undone)
        common = next((s for s in known if s.step == min(steps)), None)
        able = common is not None and common.is_whole()
        return common if all(self._exchange(able, "whether the snapshot can be restored")) else None

    def rerun(self, rerun: Rerun | None) -> Rerun | None:
        """Return the steps to replay, or `None` if a process cannot replay the same ones."""
        steps = None if rerun is None else [batch is not None for batch in rerun.batches]
        messages = self._exchange(steps, "the steps to replay")
        return rerun if all(message == messages[0] for message in messages) else None


def united(parts: Iterable[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all processes in the order of their ranks, the first one for each
    place.

    A sum that all of them have is omitted if one of them has found the bad array.
    """
    by_place: dict[tuple[str, str, str], Finding] = {}
    for finding in (finding for part in parts for finding in part):
        by_place.setdefault((finding.site, finding.kind, finding.path), finding)
    named = {finding.site for finding in by_place.values() if finding.path}
    return [f for f in by_place.values() if f.path or f.site not in named]


def informed(messages: Sequence[tuple[Sequence[str], str | None]]) -> int:
    """Return the rank whose diagnosis is used: the one with the most at the earliest site.

    Args:
        messages: for each rank the first of its own sites with a finding, if any, and its cause.
    """

    def order(rank: int) -> tuple[int, bool, int]:
        sites, cause = messages[rank]
        site = SITES.index(sites[0]) if sites else len(SITES)
        return site, cause in (None, "unknown", "transient"), rank

    return min(range(len(messages)), key=order)


def _with_rows(
    findings: Sequence[Finding], report: Report | None, names: tuple[str, ...], rank: int
) -> list[Finding]:
    """Return findings in a batch with rank and rows in their path: `rank 1: x, row 8`."""
    if report is None:
        return list(findings)
    of_batch = batches.bad(report.batch, ARGUMENTS) if report.batch is not None else ()
    rows = {named(argument_path(part.name), names): part.rows for part in of_batch}

    def labelled(finding: Finding) -> Finding:
        if finding.site not in ("inputs", "targets"):
            return finding
        places = _by_process(report, rows.get(finding.path, ()), rank)
        return replace(finding, path=_located(finding.path, places or {rank: ()}))

    return [labelled(finding) for finding in findings]


def _by_process(report: Report, rows: Sequence[int], rank: int) -> Mapping[int, Sequence[int]]:
    """Return rows of the batch of a report by rank, as indices into the part of that process."""
    arrays = (part.value for part in batches.parts(report.batch) if len(part.value.shape))
    return keras_arrays.rows_by_process(next(arrays, None), rows, rank)


def _located(name: str, rows: Mapping[int, Sequence[int]]) -> str:
    """Return the rows of an array by rank in words: `rank 0: x, row 1; rank 1: x, row 8`."""
    return "; ".join(f"rank {rank}: {name}{_rows(own)}" for rank, own in rows.items())


def _rows(rows: Sequence[int]) -> str:
    """Return rows as words that follow the name of an array, `""` if there are none."""
    if not rows:
        return ""
    listed, more = ", ".join(map(str, rows[:MAX_ROWS])), ", ..." if len(rows) > MAX_ROWS else ""
    return f", row{'s' if len(rows) > 1 else ''} {listed}{more}"
