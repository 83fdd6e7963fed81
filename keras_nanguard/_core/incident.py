"""The records that cross every seam: site -> verdict -> incident -> decision -> outcome.

All of them are frozen, hold only plain Python values and print as JSON with a format number.
Level 0: imports no backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from keras_nanguard._core.data_names import shown
from keras_nanguard._core.errors import FileFormatError, expected

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
"""Number of the JSON form of an `Incident`; raised whenever a reader of the old form would misread the new one."""

SITES = (
    "inputs",
    "targets",
    "state",
    "outputs",
    "loss",
    "gradients",
    "weights",
    "statistics",
    "slots",
    "loss_scale",
    "metrics",
    "validation",
    "predictions",
)
"""Where trouble shows, in causal order: what stands earlier can cause what stands later, never the reverse."""

KINDS = ("nonfinite", "explosion", "spike", "out_of_range", "collapse", "stuck")
"""What the trouble is.

`nonfinite`: NaN or Inf. `explosion`: finite, and so large that the next operation overflows or that it grew by orders
of magnitude over steps. `spike`: one finite jump. `out_of_range`: outside the limits that the policy sets. `collapse`:
a loss scale at which nothing can be learned. `stuck`: a value that has to move and does not (BatchNorm statistics,
dead gradients).
"""

CAUSES = (
    "input_nonfinite",
    "target_nonfinite",
    "target_out_of_range",
    "input_scale",
    "forward_domain",
    "loss_domain",
    "gradient_domain",
    "divergence",
    "float16_overflow",
    "float16_underflow",
    "loss_scale_collapsed",
    "optimizer_domain",
    "state_nonfinite",
    "batchnorm_statistics",
    "training_flag",
    "spike",
    "transient",
    "unknown",
)
"""The closed list of causes; docs/causes.md has a paragraph on each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where one step went bad.

    Attributes:
        site: one of `SITES`.
        kind: one of `KINDS`.
        path: Keras path of the layer or variable, name of the loss or metric, or `""` where the site has one place only.
        nan: number of NaN entries, or `None` where they were not counted.
        inf: number of +Inf and -Inf entries, or `None` where they were not counted.
        size: number of entries looked at, or `None` where they were not counted.
        value: the offending number (a loss, a norm, a scale), or `None`.
    """

    site: str
    kind: str = "nonfinite"
    path: str = ""
    nan: int | None = None
    inf: int | None = None
    size: int | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        _one_of(self.site, SITES, "site")
        _one_of(self.kind, KINDS, "kind")

    def __str__(self) -> str:
        """Return it in words: `gradients of dense/kernel: 96 of 96 NaN`."""
        where = f"{self.site} of {self.path}" if self.path else self.site
        if self.site in ("inputs", "targets") and self.path:
            where = f"{self.site} {self.path}"
        counts = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.inf, "Inf")) if count]
        if counts and self.size and self.size > 1:
            return f"{where}: {' and '.join(counts)} of {self.size}"
        if counts:
            return f"{where}: {counts[0].split()[1]}"
        if self.kind == "nonfinite" and self.value is not None:
            return f"{where}: {'NaN' if math.isnan(self.value) else 'Inf'}"
        return f"{where}: {self.kind}" + ("" if self.value is None else f" ({self.value:.4g})")


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """Why a step went bad, with the evidence that decided it.

    Attributes:
        cause: one of `CAUSES`.
        culprit: Keras path of the layer or variable, or the name of the loss.
        samples: row indices within the batch, most suspicious first; empty where no row is to blame.
        evidence: sentences, each something that was measured.
        advice: sentences, each something to do next.
        confidence: between 0.0 and 1.0.
    """

    cause: str = "unknown"
    culprit: str = ""
    samples: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    confidence: float = 0.0

    def __post_init__(self) -> None:
        _one_of(self.cause, CAUSES, "cause")

    @property
    def place(self) -> str:
        """Cause and culprit in a few words, data by the name that `fit` gives it: `input_nonfinite in 'x'`."""
        return f"{self.cause} in {self.culprit_shown!r}" if self.culprit else self.cause

    @property
    def culprit_shown(self) -> str:
        """The culprit as the user calls it: data by the name that `fit` gives it."""
        return shown(self.culprit) if self.cause in ("input_nonfinite", "target_nonfinite", "input_scale") else self.culprit

    @property
    def headline(self) -> str:
        """Cause, place and rows in one sentence."""
        words = f"Cause: {self.place}"
        if self.samples:
            shown = ", ".join(str(s) for s in self.samples[:5]) + (", ..." if len(self.samples) > 5 else "")
            words += f", at {'index' if len(self.samples) == 1 else 'indices'} {shown} of the batch"
        return f"{words}."

    def __str__(self) -> str:
        """Return it on several lines: the cause, what was seen, what to do."""
        return "\n".join([self.headline, *(f"  seen: {text}" for text in self.evidence), *(f"  do:   {text}" for text in self.advice)])

    def __repr__(self) -> str:
        known = {"culprit": self.culprit, "samples": self.samples, "confidence": self.confidence}
        return f"Diagnosis({self.cause!r}{''.join(f', {name}={value!r}' for name, value in known.items() if value)})"


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """What the policy chose, as data.

    Attributes:
        rule: name of the rule that fired, `""` where none did.
        actions: the actions in order, each a plain mapping with the key `action` and its parameters.
        reason: one sentence.
        terminal: whether training ends with this decision.
    """

    rule: str = ""
    actions: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    terminal: bool = False

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return f"Decision({self.rule!r}, actions=[{', '.join(str(action.get('action')) for action in self.actions)}])"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one action: `status` is `"done"` or `"skipped"`, `detail` says what was done or why it was not."""

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
    """The frozen record of one step whose verdict is bad.

    `print(incident)` shows the line that is printed while training runs. It counts steps, epochs and batches from 1, as the
    progress bar of Keras does; the attributes count from 0, as the arguments of Keras' callbacks do.

    Attributes:
        step: train batches since this fit began, from 0 (exact also inside `steps_per_execution`).
        epoch: epoch number, from 0.
        batch: batch within the epoch, from 0.
        findings: every bad site, in causal order.
        refused: True where the step did not commit, False where the trouble was seen in a committed state.
        values: what the step measured: `loss`, `gradient_norm`, `learning_rate`, `loss_scale` (those that exist).
        diagnosis: why, or `None` where no diagnosis was made.
        decision: what the policy chose.
        outcomes: what came of each action.
        bundle: folder from which the step can be replayed, or `None`.
        replicas: numbers of the replicas that saw something bad, where a strategy trains on several; else empty.
        committed: how many good steps had committed in this fit when it happened, or `None` where that is not known.
    """

    step: int
    epoch: int
    batch: int
    findings: tuple[Finding, ...]
    refused: bool = True
    values: Mapping[str, float] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    decision: Decision | None = None
    outcomes: tuple[Outcome, ...] = ()
    bundle: str | None = None
    replicas: tuple[int, ...] = ()
    committed: int | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """The distinct sites of the findings, in causal order."""
        seen = {finding.site for finding in self.findings}
        return tuple(site for site in SITES if site in seen)

    @property
    def first(self) -> Finding | None:
        """The first finding in causal order, or `None` where there is none."""
        return min(self.findings, key=lambda finding: SITES.index(finding.site), default=None)

    @property
    def changes(self) -> tuple[str, ...]:
        """The names of the actions that were done, but for leaving the step out and telling of it."""
        return tuple(o.action for o in self.outcomes if o.status == "done" and o.action not in ("skip", "warn"))

    @property
    def moment(self) -> str:
        """When it happened, in words that count from 1: `step 6 (epoch 1, batch 6)`, `in predict`, `before the first step`."""
        if "predictions" in self.sites:
            return "in predict"
        if "validation" in self.sites:
            return "in evaluate" if self.decision is None else f"in the validation of epoch {self.epoch + 1}"
        if "state" in self.sites and not self.refused:
            return "before the first step"
        replicas = ", ".join(str(number) for number in self.replicas)
        named = f", replica{'s' if len(self.replicas) > 1 else ''} {replicas}" if replicas else ""
        return f"step {self.step + 1} (epoch {self.epoch + 1}, batch {self.batch + 1}{named})"

    def __str__(self) -> str:
        """Return the line that is printed for it; what was done is part of it, and the advice where it is the user's turn."""
        also = f" (+{len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        parts = [f"{self.moment}{' refused' if self.refused else ''}: {self.first or 'trouble'}{also}."]
        if self.diagnosis is not None:
            parts += [self.diagnosis.headline, *(self.diagnosis.advice if self._asks else ())]
        parts += [f"-> {o}." for status in ("done", "skipped") for o in self.outcomes if o.status == status and str(o) != "warn"]
        return " ".join(parts)

    @property
    def _asks(self) -> bool:
        """Whether only the user can go on from here: training ends, or a result is bad, about which nothing is done."""
        ends = self.decision is not None and self.decision.terminal
        return ends or bool({"validation", "predictions"} & set(self.sites))

    def __repr__(self) -> str:
        cause = f", cause={self.diagnosis.cause!r}" if self.diagnosis is not None else ""
        return (
            f"Incident(step={self.step}, epoch={self.epoch}, batch={self.batch}, sites={self.sites}, "
            f"refused={self.refused}{cause}, changes={self.changes})"
        )

    def with_(self, **changes: Any) -> Incident:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; non-finite numbers become the strings `"nan"`, `"inf"`, `"-inf"`."""
        plain: dict[str, Any] = _plain(asdict(self))
        return {"format": FORMAT, **plain}

    def to_json(self) -> str:
        """Return `to_dict()` as strict JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        """Rebuild an incident from `to_dict()`.

        Raises:
            FileFormatError: if `format` is missing or of a newer version, or a field is missing or unknown.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            received = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise FileFormatError(
                expected(
                    f"an incident of format {FORMAT}", f"format={received!r}", "Read it with the version that wrote it."
                )
            )
        known = {f.name for f in fields(cls)}
        given = {key: value for key, value in data.items() if key != "format"}
        if not set(given) <= known or not {"step", "epoch", "batch", "findings"} <= set(given):
            raise FileFormatError(
                expected(
                    f"the fields {sorted(known)}", sorted(given), "Do not edit incident files by hand."
                )
            )
        try:
            return cls(**{**given, **_records(given)})
        except (TypeError, ValueError) as error:
            raise FileFormatError(f"The incident has a malformed field: {error}") from error


def _records(given: Mapping[str, Any]) -> dict[str, Any]:
    diagnosis, decision = given.get("diagnosis"), given.get("decision")
    return {
        "findings": tuple(Finding(**{**f, "value": _number(f.get("value"))}) for f in given["findings"]),
        "values": {key: _number(value) for key, value in given.get("values", {}).items()},
        "diagnosis": Diagnosis(**{k: _tupled(v) for k, v in diagnosis.items()}) if diagnosis else None,
        "decision": Decision(**{k: _tupled(v) for k, v in decision.items()}) if decision else None,
        "outcomes": tuple(Outcome(**o) for o in given.get("outcomes", ())),
        "replicas": tuple(given.get("replicas", ())),
    }


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise ValueError(expected(f"{name} to be one of {', '.join(allowed)}", repr(value), "Correct the name."))
