"""The records that all parts exchange, in the order in which they arise:

    Finding    one bad value or array of a step
    Diagnosis  the cause, with the evidence and the advice
    Decision   the actions that the policy has chosen
    Outcome    the result of one action
    Incident   one bad step, with its findings and all of these

All of them are frozen, contain only plain Python values and convert to JSON with a format version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from keras_nanguard._core import plain_values
from keras_nanguard._core.data import argument_path
from keras_nanguard._core.errors import FileFormatError, NanGuardError, expected
from keras_nanguard._core.json_records import STORED, Whole, stored
from keras_nanguard._core.literals import (
    CAUSES,
    KINDS,
    NAMES_DATA,
    RESULT_SITES,
    SITES,
    Cause,
    Kind,
    Site,
)
from keras_nanguard._core.plain_values import plain_text

FORMAT = 1
"""Version of the JSON format of an `Incident`; incremented whenever a reader of the old format
would misread the new one."""

BUNDLES = "incidents"
"""Name of the folder within a guard's directory in which each incident has its bundle."""


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        what = f"{name} to be one of {', '.join(allowed)}"
        raise ValueError(expected(what, repr(value), "Correct the name."))


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

    Raises:
        ValueError: if `site` or `kind` is none of these words.
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
        both = ((self.nan, "NaN"), (self.inf, "Inf"))
        found = [(count, name) for count, name in both if count]
        if found and self.size and self.size > 1:
            counts = [f"{count} {name}" for count, name in found]
            return f"{where}: {' and '.join(counts)} of {self.size}"
        if found:
            return f"{where}: {' and '.join(name for _, name in found)}"
        if self.kind == "nonfinite" and self.value is not None:
            return f"{where}: {'NaN' if math.isnan(self.value) else 'Inf'}"
        return f"{where}: {self.kind}" + ("" if self.value is None else f" ({self.value:.4g})")


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The cause of a bad step, with the evidence for it.

    Attributes:
        cause: one of `CAUSES`.
        culprit: Keras path of the layer or variable, or the name of the input, target or loss.
        samples: row indices within the batch, most suspicious first; empty if no row is to blame.
        evidence: sentences, each an observation or a measurement.
        advice: sentences, each a recommendation.
        confidence: 0.95 if the bad number was seen where it comes from, 0.9 if an operation or a
            replay shows the cause, 0.8 if measurements explain it, 0.6 if none contradicts it, 0.0
            if the cause is `unknown`.
        diverged: whether training had diverged: the cause is `divergence`, or `input_scale` after a
            divergence.

    Raises:
        ValueError: if `cause` is none of these words.
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
        """The causes that the field `cause` of a rule matches: `cause`, and `divergence` if
        `diverged`."""
        return frozenset({self.cause, "divergence"} if self.diverged else {self.cause})

    @property
    def place(self) -> str:
        """Cause and `culprit_shown`, such as `input_nonfinite in 'x'`."""
        return f"{self.cause} in {self.culprit_shown!r}" if self.culprit else self.cause

    @property
    def culprit_shown(self) -> str:
        """The culprit as printed: data is named after its argument of `fit`, such as `x/age`."""
        return argument_path(self.culprit) if self.cause in NAMES_DATA else self.culprit

    @property
    def headline(self) -> str:
        """Cause, place and samples in one sentence."""
        if not self.samples:
            return f"Cause: {self.place}."
        listed = [*map(str, self.samples[:5]), *(["..."] if len(self.samples) > 5 else [])]
        indices = f"{'index' if len(self.samples) == 1 else 'indices'} {', '.join(listed)}"
        return f"Cause: {self.place}, at {indices} of the batch."

    def __str__(self) -> str:
        """Return it on several lines: the cause, the evidence, the advice."""
        seen = [f"  evidence: {text}" for text in self.evidence]
        return "\n".join([self.headline, *seen, *(f"  advice:   {text}" for text in self.advice)])

    def __repr__(self) -> str:
        known = {"culprit": self.culprit, "samples": self.samples, "confidence": self.confidence}
        more = "".join(f", {name}={value!r}" for name, value in known.items() if value)
        return f"Diagnosis({self.cause!r}{more})"


MAX_RATE = 1e3
"""Learning rate of a schedule above which the schedule is wrong."""

_RATE = "/learning_rate"


def rate_of(optimizer: str) -> str:
    """Return the culprit of a diagnosis that blames the learning rate of an optimizer."""
    return optimizer + _RATE


def blames_rate(diagnosis: Diagnosis | None) -> bool:
    """Return whether the culprit is the `rate_of` an optimizer."""
    return diagnosis is not None and diagnosis.culprit.endswith(_RATE)


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
        names = ", ".join(str(action.get("action")) for action in self.actions)
        return f"Decision({self.rule!r}, actions=[{names}])"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one action.

    Attributes:
        action: name of the action.
        status: `"done"` or `"skipped"`.
        detail: what was done, or why it was not.

    Raises:
        ValueError: if `status` is neither.
    """

    __pydantic_config__ = STORED

    action: str
    status: Literal["done", "skipped"]
    detail: str = ""

    def __post_init__(self) -> None:
        _one_of(self.status, ("done", "skipped"), "status")

    def __str__(self) -> str:
        what = self.action if self.status == "done" else f"{self.action} not done"
        return f"{what}: {self.detail}" if self.detail else what


_STATE = "the state "
RATE_LEFT = "the learning rate of "
"""How each sentence about a learning rate begins that was lowered before the end of training."""


def restored_state(moment: str, result: str) -> str:
    """Return in words that a state from this moment was to be restored, and the result."""
    return f"{_STATE}{moment} {result}"


def restored_at_end(outcome: Outcome) -> str:
    """Return the `restored_state` of an action that has ended training, `""` without one. In its
    detail it follows how training ends, and precedes the learning rates.
    """
    _, found, rest = outcome.detail.partition(f"; {_STATE}")
    state = rest.partition(f"; {RATE_LEFT}")[0]
    return f"{_STATE}{state}" if found else ""


@dataclass(frozen=True, slots=True, repr=False)
class Incident:
    """The record of one bad step. Its fields cannot be changed.

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
            if they exist. Also `onset`, the step at which a divergence began, `rate_factor`, the
            factor of the learning rate that trials found for it, `pole`, the iteration at
            which a schedule gave NaN, Inf or a rate that overflows the weights, and
            `bad_at_start`, which is 1 if a rollback was due, and the step is bad from the state
            before the first step, too.
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
        """The `causes` of the diagnosis; empty if there is no diagnosis."""
        return frozenset() if self.diagnosis is None else self.diagnosis.causes

    @property
    def diverged(self) -> bool:
        """Whether training had diverged, by its diagnosis or by a finding."""
        return "divergence" in self.causes or any(f.kind == "divergence" for f in self.findings)

    @property
    def first(self) -> Finding | None:
        """The first finding in causal order, or `None` without findings."""
        return min(self.findings, key=lambda finding: SITES.index(finding.site), default=None)

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the performed actions, except `skip` and `warn`."""
        done = (outcome.action for outcome in self.outcomes if outcome.status == "done")
        return tuple(action for action in done if action not in ("skip", "warn"))

    @property
    def onset(self) -> float | None:
        """The step at which a divergence began; `None` without one."""
        return self.values.get("onset")

    @property
    def pole(self) -> float | None:
        """The iteration at which a schedule gave no usable learning rate; `None` if none did."""
        return self.values.get("pole")

    @property
    def bad_at_start(self) -> bool:
        """Whether the step is known to be bad from the state before the first step, too."""
        return "bad_at_start" in self.values

    @property
    def moment(self) -> str:
        """Step, epoch and batch in words, counted from 1: `step 6 (epoch 1, batch 6)`."""
        return moment_of(self, f", batch {self.batch + 1}")

    def __str__(self) -> str:
        """Return one line: findings, cause, outcomes, and advice if the user has to act."""
        also = f" (+{len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        refused = " refused" if self.refused else ""
        parts = [f"{self.moment}{refused}: {self.first or 'incident'}{also}."]
        if self.diagnosis is not None:
            if self.onset is not None and self.onset < self.step:  # of a divergence, noticed later
                parts.append(f"Onset at step {self.onset + 1:.0f}.")
            parts.append(self.diagnosis.headline)
            parts += self.diagnosis.advice if needs_user(self) else ()
        outcomes = sorted(self.outcomes, key=lambda outcome: outcome.status)  # done, then skipped
        return " ".join([*parts, *(f"-> {outcome}." for outcome in outcomes)])

    def __repr__(self) -> str:
        cause = f", cause={self.diagnosis.cause!r}" if self.diagnosis is not None else ""
        where = f"step={self.step}, epoch={self.epoch}, batch={self.batch}, sites={self.sites}"
        return f"Incident({where}, refused={self.refused}{cause}, changes={self.changes})"

    def with_(self, **changes: Any) -> Incident:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, non-finite numbers as `"nan"`, `"inf"` and `"-inf"`."""
        return {"format": FORMAT, **plain_values.plain(asdict(self))}

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
            what, shown = f"an incident of format {FORMAT}", plain_text(f"format={received!r}")
            remedy = "Read it with the version that wrote it."
            raise FileFormatError(expected(what, shown, remedy))
        try:
            plain_values.check_depth(data)
            return stored(cls, {key: value for key, value in data.items() if key != "format"})
        except ValueError as error:
            reason = f"The incident has a malformed field: {plain_text(error)}"
            raise FileFormatError(reason) from error


def moment_of(incident: Incident, batch: str = "") -> str:
    """Return when an incident happened, counted from 1: `step 6 (epoch 1)`.

    Args:
        batch: further words after the epoch of a step.
    """
    if between := between_steps(incident):
        return between
    replicas = ", ".join(str(number) for number in incident.replicas)
    named = f", replica{'s' if len(incident.replicas) > 1 else ''} {replicas}" if replicas else ""
    return f"step {incident.step + 1} (epoch {incident.epoch + 1}{batch}{named})"


def between_steps(incident: Incident) -> str:
    """Return when an incident happened that is not about a step, `""` for one about a step."""
    if "predictions" in incident.sites:
        return "in predict"
    if "validation" in incident.sites:
        validation = f"in the validation of epoch {incident.epoch + 1}"
        return "in evaluate" if incident.decision is None else validation
    return "before the first step" if "state" in incident.sites and not incident.refused else ""


def needs_user(incident: Incident) -> bool:
    """Return whether training ends, or a result of `evaluate` or `predict` is bad."""
    terminal = incident.decision is not None and incident.decision.terminal
    return terminal or any(site in RESULT_SITES for site in incident.sites)


class NonFiniteError(NanGuardError, FloatingPointError):
    """Raised by the action `raise_error`.

    The message describes the incident: what, where, why, and what to do.

    Attributes:
        incident: the complete `Incident`.
    """

    def __init__(self, message: str, incident: Incident | None = None):
        super().__init__(message)
        self.incident = incident


NonFiniteError.__module__ = "keras_nanguard.errors"  # the public module, which pickle stores
