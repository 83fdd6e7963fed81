"""The records that all parts exchange: site -> verdict -> incident -> decision -> outcome.

All of them are frozen, contain only plain Python values and convert to JSON with a format version.
Imports no backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from keras_nanguard._core import plain_json
from keras_nanguard._core.data_names import argument_path
from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.literals import Cause, Kind, Site
from keras_nanguard._core.notebook import block
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._core.stored_records import STORED, Whole, stored

__all__ = [
    "CAUSES",
    "FORMAT",
    "KINDS",
    "SITES",
    "Decision",
    "Diagnosis",
    "Finding",
    "Incident",
    "Outcome",
]

FORMAT = 1
"""Version of the JSON format of an `Incident`; incremented whenever a reader of the old format
would misread the new one."""

SITES: tuple[str, ...] = get_args(Site)
"""Parts of a step that are checked, in causal order: an earlier site can cause a finding at a later
one, never the reverse."""

KINDS: tuple[str, ...] = get_args(Kind)
"""The kinds of findings.

`nonfinite`: NaN or Inf. `explosion`: every entry is finite, but a sum over them overflowed, in a
step that was refused. `divergence`: the run is proven lost although every number is finite.
`spike`: a moving variance that grew more than 1000-fold between two checks. `out_of_range`: outside
of a limit. `collapse`: a loss scale below its floor, or invalid. `stuck`: a value that should
change and does not (BatchNorm statistics, zero gradients).
"""

CAUSES: tuple[str, ...] = get_args(Cause)
"""The closed list of causes; docs/causes.md has a paragraph on each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One bad value or array in one step.

    Attributes:
        site: one of `SITES`.
        kind: one of `KINDS`.
        path: Keras path of the layer or variable, name of the loss or metric, or `""` if the site
            is a single value.
        nan: number of NaN entries, or `None` if not counted.
        inf: number of +Inf and -Inf entries, or `None` if not counted.
        size: number of entries, or `None` if not counted.
        value: the offending number (a loss, a norm, a scale), or `None`.
    """

    __pydantic_config__ = STORED

    site: Site
    kind: Kind = "nonfinite"
    path: str = ""
    nan: Whole | None = None
    inf: Whole | None = None
    size: Whole | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        _one_of(self.site, SITES, "site")
        _one_of(self.kind, KINDS, "kind")

    def __str__(self) -> str:
        """Return it in words: `gradients of dense/kernel: 96 NaN of 96`."""
        where = f"{self.site} of {self.path}" if self.path else self.site
        if self.site in ("inputs", "targets") and self.path:
            where = f"{self.site} {self.path}"
        counts = [
            f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count
        ]
        if counts and self.size and self.size > 1:
            return f"{where}: {' and '.join(counts)} of {self.size}"
        if counts:
            return f"{where}: {counts[0].split()[1]}"
        if self.kind == "nonfinite" and self.value is not None:
            return f"{where}: {'NaN' if math.isnan(self.value) else 'Inf'}"
        return f"{where}: {self.kind}" + ("" if self.value is None else f" ({self.value:.4g})")


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The cause of a bad step, with the evidence for it.

    Attributes:
        cause: one of `CAUSES`.
        culprit: Keras path of the layer or variable, or the name of the loss.
        samples: row indices within the batch, most suspicious first; empty if no row is to blame.
        evidence: sentences, each an observation or a measurement.
        advice: sentences, each a recommendation.
        confidence: between 0.0 and 1.0.
        diverged: whether training had diverged: the cause is `divergence`, or `input_scale` after a
            divergence.
    """

    __pydantic_config__ = STORED

    cause: Cause = "unknown"
    culprit: str = ""
    samples: tuple[Whole, ...] = ()
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    confidence: float = 0.0
    diverged: bool = False

    def __post_init__(self) -> None:
        _one_of(self.cause, CAUSES, "cause")
        object.__setattr__(self, "diverged", self.diverged or self.cause == "divergence")

    @property
    def causes(self) -> frozenset[str]:
        """The causes that a rule matches: its own, and `divergence` if training had diverged."""
        return frozenset({self.cause, "divergence"} if self.diverged else {self.cause})

    @property
    def place(self) -> str:
        """Cause and culprit, data by the argument of `fit`: `input_nonfinite in 'x'`."""
        return f"{self.cause} in {self.culprit_shown!r}" if self.culprit else self.cause

    @property
    def culprit_shown(self) -> str:
        """The culprit as it is displayed: data are named by the argument of `fit`."""
        return (
            argument_path(self.culprit)
            if self.cause in ("input_nonfinite", "target_nonfinite", "input_scale")
            else self.culprit
        )

    @property
    def headline(self) -> str:
        """Cause, place and samples in one sentence."""
        words = f"Cause: {self.place}"
        if self.samples:
            indices = ", ".join(str(s) for s in self.samples[:5]) + (
                ", ..." if len(self.samples) > 5 else ""
            )
            words += (
                f", at {'index' if len(self.samples) == 1 else 'indices'} {indices} of the batch"
            )
        return f"{words}."

    def __str__(self) -> str:
        """Return it on several lines: the cause, the evidence, the advice."""
        return "\n".join(
            [
                self.headline,
                *(f"  seen: {text}" for text in self.evidence),
                *(f"  do:   {text}" for text in self.advice),
            ]
        )

    def __repr__(self) -> str:
        known = {"culprit": self.culprit, "samples": self.samples, "confidence": self.confidence}
        more = "".join(f", {name}={value!r}" for name, value in known.items() if value)
        return f"Diagnosis({self.cause!r}{more})"


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """The decision of the policy, as data.

    Attributes:
        rule: name of the rule that decided, `""` if none did.
        actions: the actions in order, each a plain mapping of `action` and its parameters.
        reason: one sentence.
        terminal: whether it ends training.
    """

    __pydantic_config__ = STORED

    rule: str = ""
    actions: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    terminal: bool = False

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return (
            f"Decision({self.rule!r},"
            f" actions=[{', '.join(str(action.get('action')) for action in self.actions)}])"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one action.

    Attributes:
        action: name of the action.
        status: `"done"` or `"skipped"`.
        detail: what was done, or why it was not.
    """

    __pydantic_config__ = STORED

    action: str
    status: str
    detail: str = ""

    def __post_init__(self) -> None:
        _one_of(self.status, ("done", "skipped"), "status")

    def __str__(self) -> str:
        what = self.action if self.status == "done" else f"{self.action} not done"
        return f"{what}: {self.detail}" if self.detail else what


@dataclass(frozen=True, slots=True, repr=False)
class Incident:
    """The record of one bad step. It is frozen.

    `print(incident)` shows the whole incident in one line, as `verbose=2` prints it during
    training. It counts steps, epochs and batches from 1, like the progress bar of Keras; the
    attributes count from 0, like the arguments of Keras' callbacks.

    Attributes:
        step: train batches since this fit began, from 0 (exact also inside `steps_per_execution`).
        epoch: epoch number, from 0.
        batch: batch within the epoch, from 0.
        findings: every bad site, in causal order.
        refused: True if the step did not commit, False if the finding is in a committed state.
        values: measurements of the step: `loss`, `gradient_norm`, `learning_rate` and `loss_scale`,
            if they exist; for a divergence `onset`, the step at which it began; and `pole`, the
            iteration at which a schedule gave no usable learning rate.
        diagnosis: the diagnosis, or `None` if none was made.
        decision: the decision of the policy.
        outcomes: the result of each action.
        bundle: folder from which the step can be replayed, or `None`.
        replicas: indices of the replicas with findings if there are several replicas; else empty.
        committed: number of steps that had committed in this fit before this one, or `None` if
            unknown.
    """

    __pydantic_config__ = STORED

    step: Whole
    epoch: Whole
    batch: Whole
    findings: tuple[Finding, ...]
    refused: bool = True
    values: Mapping[str, float] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    decision: Decision | None = None
    outcomes: tuple[Outcome, ...] = ()
    bundle: str | None = None
    replicas: tuple[Whole, ...] = ()
    committed: Whole | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """The distinct sites of the findings, in causal order."""
        seen = {finding.site for finding in self.findings}
        return tuple(site for site in SITES if site in seen)

    @property
    def causes(self) -> frozenset[str]:
        """The causes that a rule matches; empty without a diagnosis. See `Diagnosis.causes`."""
        return frozenset() if self.diagnosis is None else self.diagnosis.causes

    @property
    def first(self) -> Finding | None:
        """The first finding in causal order, or `None` without findings."""
        return min(self.findings, key=lambda finding: SITES.index(finding.site), default=None)

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the actions that were performed, without `skip` and `warn`."""
        return tuple(
            o.action
            for o in self.outcomes
            if o.status == "done" and o.action not in ("skip", "warn")
        )

    @property
    def moment(self) -> str:
        """Its time in words, counted from 1: `step 6 (epoch 1, batch 6)`, `before the first
        step`.
        """
        if "predictions" in self.sites:
            return "in predict"
        if "validation" in self.sites:
            return (
                "in evaluate"
                if self.decision is None
                else f"in the validation of epoch {self.epoch + 1}"
            )
        if "state" in self.sites and not self.refused:
            return "before the first step"
        replicas = ", ".join(str(number) for number in self.replicas)
        named = f", replica{'s' if len(self.replicas) > 1 else ''} {replicas}" if replicas else ""
        return f"step {self.step + 1} (epoch {self.epoch + 1}, batch {self.batch + 1}{named})"

    def __str__(self) -> str:
        """Return one line: findings, cause, outcomes, and advice if the user has to act."""
        also = f" (+{len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        parts = [
            f"{self.moment}{' refused' if self.refused else ''}: {self.first or 'incident'}{also}."
        ]
        if self.diagnosis is not None:
            parts += [
                *self._since,
                self.diagnosis.headline,
                *(self.diagnosis.advice if self._needs_user else ()),
            ]
        parts += [
            f"-> {o}."
            for status in ("done", "skipped")
            for o in self.outcomes
            if o.status == status and str(o) != "warn"
        ]
        return " ".join(parts)

    @property
    def _since(self) -> tuple[str, ...]:
        """The onset of a divergence, if it was before the step at which the divergence was
        noticed.
        """
        onset = self.values.get("onset")
        return () if onset is None or onset >= self.step else (f"Onset at step {onset + 1:.0f}.",)

    @property
    def _needs_user(self) -> bool:
        """Whether the user has to act: training ends, or a result of `evaluate` or `predict` is
        bad.
        """
        terminal = self.decision is not None and self.decision.terminal
        return terminal or bool({"validation", "predictions"} & set(self.sites))

    def __repr__(self) -> str:
        cause = f", cause={self.diagnosis.cause!r}" if self.diagnosis is not None else ""
        return (
            f"Incident(step={self.step}, epoch={self.epoch}, batch={self.batch},"
            f" sites={self.sites}, refused={self.refused}{cause}, changes={self.changes})"
        )

    def _repr_html_(self) -> str:
        lines = (
            ()
            if self.diagnosis is None
            else (*self.diagnosis.evidence, *(f"Do: {text}" for text in self.diagnosis.advice))
        )
        return block(
            str(self),
            lines,
            ("site", "place", "what"),
            [(f.site, f.path, f) for f in self.findings],
        )

    def plot(self) -> Any:
        """Return a matplotlib figure of the findings, in causal order from the top. Needs the extra
        `plot`.

        Raises:
            GuardError: if matplotlib is not installed.
        """
        from keras_nanguard._core.drawing import bad_places

        return bad_places(
            f"{self.moment}: {self.diagnosis.headline if self.diagnosis else self.first or ''}",
            self.findings,
        )

    def with_(self, **changes: Any) -> Incident:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; non-finite numbers become the strings `"nan"`, `"inf"`,
        `"-inf"`.
        """
        return {"format": FORMAT, **plain_json.plain(asdict(self))}

    def to_json(self) -> str:
        """Return `to_dict()` as strict JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        """Rebuild an incident from `to_dict()`.

        Raises:
            FileFormatError: if `format` is missing or of a newer version, or a field is missing or
                unknown.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            received = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise FileFormatError(
                expected(
                    f"an incident of format {FORMAT}",
                    plain_text(f"format={received!r}"),
                    "Read it with the version that wrote it.",
                )
            )
        try:
            plain_json.check_depth(data)
            return stored(cls, {key: value for key, value in data.items() if key != "format"})
        except ValueError as error:
            raise FileFormatError(
                f"The incident has a malformed field: {plain_text(error)}"
            ) from error


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise ValueError(
            expected(f"{name} to be one of {', '.join(allowed)}", repr(value), "Correct the name.")
        )
