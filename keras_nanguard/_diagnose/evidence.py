"""The evidence of a diagnosis: measured facts, and what follows from them alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keras_nanguard._core.incident import MAX_RATE, Incident
from keras_nanguard._core.literals import LOW, RESULT_SITES
from keras_nanguard._core.observations import NOWHERE, BadArray, Origin, Spread
from keras_nanguard._core.verdict import LayerRow
from keras_nanguard._diagnose.growth import Growth

GROWTH = 1e3
"""Growth of loss or gradients since the start above which they count as a reason for the failure.
"""

MIN_WEIGHT_GROWTH = 20.0
"""The same for the norm of all weights."""

HUGE_DATA = 1e4
"""Magnitude above which inputs or targets alone explain a divergence in the first steps."""

LARGE_DATA = 1e3
"""Magnitude above which a trial tests whether they explain it."""

MAX_NORM = 1e15
"""Gradient norm above which the squares in an optimizer may overflow, in float32."""

FEW = 0.25
"""Share of the rows of a batch up to which they are few."""

EXPONENTIALS = frozenset({"Exp", "Expm1", "Sinh", "Cosh", "Softplus", "Pow"})
"""Operations that overflow for moderate operands."""

DIVISIONS = ("RealDiv", "Div", "Xdivy")
"""Operations that have a pole if their second operand is 0."""

POLES = frozenset(
    (
        *("RealDiv", "Div", "TruncateDiv", "FloorDiv", "FloorMod", "Xdivy", "Reciprocal", "Inv"),
        *("Sqrt", "Rsqrt", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"),
        *("Log", "Log1p", "Xlogy", "Xlog1py", "Lgamma", "Digamma", "Polygamma", "Zeta"),
        *("Betainc", "Igamma", "Softmax", "LogSoftmax"),
        *("Acos", "Asin", "Acosh", "Atanh", "Atan2", "Sin", "Cos", "Tan", "Erfinv", "Ndtri"),
        *("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant"),
        *("MatrixSolve", "Svd", "Qr"),
    )
)
"""Operations with points at which their value is not finite."""

MAX_BASE = 50.0
"""Base of a power above which it overflows because of its exponent."""


def distinct(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return each of these rows once, in their order."""
    return tuple(dict.fromkeys(row for part in rows for row in part))


@dataclass(frozen=True, slots=True)
class TargetFault:
    """Targets that a loss does not accept.

    Attributes:
        loss: name of the loss.
        output: name of the output, `""` if there is only one.
        words: what is wrong, as a clause: `"class index 12 with 10 classes"`.
        proof: why they are the reason for the failure, as a sentence; `""` if that is not known.
    """

    loss: str
    output: str
    rows: tuple[int, ...]
    words: str
    proof: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The hyperparameters of an optimizer.

    Attributes:
        name: name of its class.
        learning_rate: its current learning rate, `None` if it cannot be read outside of a step.
        epsilon: as configured, `None` if it has none.
        epsilon_in_dtype: its value after rounding to the dtype of the weights.
        dtype: lowest dtype of the weights.
        scaled: whether a `LossScaleOptimizer` wraps it.
        scheduled: whether its learning rate comes from a schedule.
        settings: name and value of each other hyperparameter that is in use, by Keras' names.
        iteration: the iteration at which the schedule gives this learning rate, `None` without one.
        own: whether its class is of no library that is known, so the user can change it.
    """

    name: str
    learning_rate: float | None
    epsilon: float | None = None
    epsilon_in_dtype: float | None = None
    dtype: str = "float32"
    clips: bool = False
    scaled: bool = False
    scheduled: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)
    iteration: int | None = None
    own: bool = False

    @property
    def rate_is_bad(self) -> bool:
        """Whether the learning rate is not finite, or above any that a schedule should give."""
        return self.learning_rate is not None and not abs(self.learning_rate) <= MAX_RATE

    @property
    def rate_is_finite(self) -> bool:
        """Whether the learning rate is finite, or unknown."""
        return self.learning_rate is None or math.isfinite(self.learning_rate)


@dataclass(frozen=True, slots=True)
class ReplayFacts:
    """What a replay of the step gave.

    Attributes:
        result: of the eager replay: `"bad"`, `"finite"`, `"failed"`, or `""` if there was none.
        same_mode: the same of a replay in the mode of the step. If it is bad and the eager one is
            not, the other fields are of this one.
        bad_site: first bad site: `"loss"`, `"statistics"`, `"gradients"`, `"weights"`, `"slots"`,
            or of a forward pass `"outputs"`; `""` if none is bad.
        bad_path: path of the variable there, or of the layer with a bad output.
        origin: the operation that produced the first bad value, `NOWHERE` if unknown.
        loss_parts: name and value of each part of the loss.
        bad_rows: rows of the batch whose loss is bad, or else whose output is; none if all are.
        output_shapes: path and shape of each output, with the rows.
        table: one row for each call of a layer.
    """

    result: str = ""
    error: str = ""
    same_mode: str = ""
    bad_site: str = ""
    bad_path: str = ""
    origin: Origin = NOWHERE
    loss_parts: tuple[tuple[str, float], ...] = ()
    bad_rows: tuple[int, ...] = ()
    output_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    table: tuple[LayerRow, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What the batch contains.

    Attributes:
        count: number of its rows.
        targets_bad: bad arrays among targets and sample weights.
    """

    count: int = 0
    inputs_bad: tuple[BadArray, ...] = ()
    targets_bad: tuple[BadArray, ...] = ()
    inputs: tuple[Spread, ...] = ()
    targets: tuple[Spread, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """The results of replays with one change, `"finite"`, `"bad"`, or `""` if there was none.

    Attributes:
        target_fault: targets that the loss does not accept, `None` if there are none.
        unscaled: with a loss scale of 1.
        rescaled: with inputs and targets scaled to unit magnitude.
        at_start: with the initial state in place of the current one.
        rows: rows to blame.
        inference: of `diagnose`, whether outputs in inference mode are finite.
        training: the same in training mode.
    """

    target_fault: TargetFault | None = None
    float32: str = ""
    unscaled: str = ""
    rescaled: str = ""
    at_start: str = ""
    without_rows: str = ""
    rows: tuple[int, ...] = ()
    inference: str = ""
    training: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured about one incident; what was not measured is `None` or empty.

    Attributes:
        incident: the incident, without its diagnosis.
        mode: how the step was compiled: `"eager"`, `"graph"`, `"xla"`.
        state: paths of variables that were bad before the step, with their roles.
        optimizers: the optimizers of the step.
        constraints: class of the constraint of each weight that has one, by path. It is applied
            after the update.
        low_precision: lowest float dtype that a layer computes in, `""` if that is float32.
        growth: the history before the step.
        written: whether the update cannot have produced the bad weights or slots, because all of
            its numbers are moderate, or because they were finite after the step before.
        notes: further observations, as sentences.
    """

    incident: Incident
    mode: str = ""
    state: tuple[tuple[str, str], ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    constraints: Mapping[str, str] = field(default_factory=dict)
    low_precision: str = ""
    growth: Growth = field(default_factory=Growth)
    written: bool = False
    batch: BatchFacts = BatchFacts()
    replay: ReplayFacts = ReplayFacts()
    trials: TrialFacts = TrialFacts()
    notes: tuple[str, ...] = ()

    @property
    def paths_before(self) -> list[str]:
        """Paths of the findings in the state before the step, or before a validation or
        prediction.
        """
        sites = self.incident.sites
        own: tuple[str, ...] = ("state",)
        if "state" not in sites and any(site in RESULT_SITES for site in sites):
            own = ("weights", "statistics")
        return [f.path for f in self.incident.findings if f.site in own]

    @property
    def left_by_step(self) -> str:
        """First bad site in the state that a committed step has left, `""` if none."""
        kinds = ("nonfinite", "explosion", "out_of_range")
        bad = {f.site for f in self.incident.findings if f.kind in kinds}
        left = (site for site in ("weights", "slots") if site in bad)
        return "" if self.incident.refused else next(left, "")

    @property
    def bad_site(self) -> str:
        """First bad site of the replay; without a replay `"weights"` or `"slots"` of the state that
        a committed step has left, unless what the update reads was bad, too, as under `observe`;
        `""` if none is bad.
        """
        read = ("inputs", "outputs", "loss", "gradients")
        if self.replay.bad_site or any(self.found(site, "nonfinite") for site in read):
            return self.replay.bad_site
        return self.left_by_step

    @property
    def bad_path(self) -> str:
        """Path of the variable there, or of the layer with a bad output; without a bad replay the
        first path in the findings.
        """
        if self.replay.bad_site:
            return self.replay.bad_path
        return next((f.path for f in self.incident.findings if f.path), "")

    @property
    def constraint(self) -> str:
        """Class of the constraint of the bad weight, `""` if it has none."""
        return self.constraints.get(self.bad_path, "") if self.bad_site == "weights" else ""

    @property
    def gradient_norm(self) -> float:
        """Global gradient norm of the step, NaN if unknown."""
        return self.incident.values.get("gradient_norm", math.nan)

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the step, `None` without one."""
        return self.incident.values.get("loss_scale")

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of the first finding at each site."""
        return {finding.site: finding.kind for finding in reversed(self.incident.findings)}

    def found(self, site: str, kind: str) -> bool:
        """Whether there is a finding of this kind at this site."""
        return any((f.site, f.kind) == (site, kind) for f in self.incident.findings)

    @property
    def value(self) -> float | None:
        """The value of the first finding that has one, such as a moving variance."""
        return next((f.value for f in self.incident.findings if f.value is not None), None)

    @property
    def mechanism(self) -> str:
        """How the origin became non-finite, from the name and the operands of its operation:
        `"overflow"` of large numbers, `"exp"` of moderate ones, `"pole"`; `""` without an
        operation.
        """
        origin, operands = self.replay.origin, self.replay.origin.operands
        if origin.source != "operation":
            return ""
        least = 1e3 if origin.dtype == "float16" else 1e15
        large = max((o.max_abs for o in operands), default=0.0) >= least
        if origin.op in DIVISIONS and len(operands) > 1:
            return "overflow" if large and not (operands[1].zero or operands[1].tiny) else "pole"
        if origin.op == "Pow":
            if large:  # a square, which PyTorch reports as Pow
                return "overflow"
            return "exp" if operands and operands[0].max_abs > MAX_BASE else "pole"
        if origin.op in EXPONENTIALS:
            return "exp"
        if origin.op in POLES or any(o.holds for o in operands):
            return "pole"
        return "overflow" if large or origin.dtype in LOW else "pole"

    @property
    def place(self) -> str:
        """The layer, loss or variable in which the operation of the origin ran."""
        origin = self.replay.origin
        if origin.source != "operation":
            return self.bad_path
        of_loss = origin.phase in ("loss", "forward", "regularizer")
        inside = "loss" if of_loss else self.bad_path
        return origin.culprit or (origin.variables[0] if origin.variables else inside)

    def grown(self, factor: float = GROWTH) -> bool:
        """Whether loss, gradients or weights have grown over the previous steps."""
        growth = self.growth
        return growth.steps >= 1 and (
            growth.weights >= MIN_WEIGHT_GROWTH or growth.loss >= factor or growth.norm >= factor
        )

    def few(self, rows: Sequence[int]) -> bool:
        """Whether some, but only few, rows of the batch are among these."""
        return 0 < len(rows) <= max(1.0, FEW * self.batch.count)

    @property
    def floats(self) -> list[Spread]:
        """The spreads of the arrays of the batch that are not integers."""
        spreads = (*self.batch.inputs, *self.batch.targets)
        return [spread for spread in spreads if not spread.integer]

    @property
    def largest(self) -> Spread:
        """The spread of the array of the batch with the largest float."""
        return max(self.floats, key=lambda s: s.max_abs, default=Spread("", 0.0, 0.0, 0.0))

    def outliers(self, spreads: Iterable[Spread]) -> tuple[int, ...]:
        """Return the rows that are outliers in these arrays of the batch, if they are few."""
        rows = distinct(spread.outliers for spread in spreads)
        return rows if self.few(rows) else ()
