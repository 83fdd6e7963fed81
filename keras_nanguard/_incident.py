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

from keras_nanguard._errors import FileFormatError, expected

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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one action: `status` is `"done"` or `"skipped"`, `detail` says what was done or why it was not."""

    action: str
    status: str
    detail: str = ""

    def __post_init__(self) -> None:
        _one_of(self.status, ("done", "skipped"), "status")


@dataclass(frozen=True, slots=True)
class Incident:
    """The frozen record of one step whose verdict is bad.

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

    @property
    def sites(self) -> tuple[str, ...]:
        """The distinct sites of the findings, in causal order."""
        seen = {finding.site for finding in self.findings}
        return tuple(site for site in SITES if site in seen)

    @property
    def first(self) -> Finding | None:
        """The first finding in causal order, or `None` where there is none."""
        return min(self.findings, key=lambda finding: SITES.index(finding.site), default=None)

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
