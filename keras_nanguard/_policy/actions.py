"""The actions of a policy, as frozen data: one class per action, and one table of all of them.

Nothing here touches a model. An action describes what to do; `_fit/perform.py` does it and records an outcome, done or
skipped with a reason. Imports no backend.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from keras_nanguard._policy.checking import check
from keras_nanguard._policy.fields import NAME, construct, non_defaults, spec

__all__ = [
    "ACTIONS",
    "Action",
    "Call",
    "Clip",
    "FixLossScale",
    "LowerLr",
    "Quarantine",
    "RaiseError",
    "RecalibrateBatchnorm",
    "Repair",
    "ResetBatchnorm",
    "ResetSlots",
    "Rollback",
    "Skip",
    "Stop",
    "Warn",
    "to_file",
    "validated",
]

REPORT, SKIP, RESTORE, CHANGE, END = range(5)
"""Phases: the order in which the actions of one decision run, whatever their order in the file. Actions that only report
or store come first, those that end training last. A rollback precedes changes of the state, so that it does not undo them."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, as data.

    Attributes:
        name: its name in policy files and in decisions.
        terminal: whether it ends training.
        changes: whether it changes the model, the optimizer or the course of training. Such an action needs a limit.
        phase: when it runs, relative to the other actions of the same decision.
    """

    name: ClassVar[str] = ""
    terminal: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    phase: ClassVar[int] = REPORT

    def __post_init__(self) -> None:
        check(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the action as a `Decision` stores it: `action` and every parameter."""
        return {"action": self.name, **asdict(self)}

    def sentence(self) -> str:
        """Return what the action does, as the predicate of a sentence that starts with "the guard"."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Skip(Action):
    """Skip the refused step and do nothing else."""

    name: ClassVar[str] = "skip"
    phase: ClassVar[int] = SKIP

    def sentence(self) -> str:
        return "skips the step"


@dataclass(frozen=True, slots=True)
class Rollback(Action):
    """Restore a verified snapshot and continue with the batches after those that failed.

    Attributes:
        depth: which verified snapshot: 1 is the newest, 2 the one before it. Beyond the oldest one, the oldest is used.
        deeper: go one snapshot deeper for every rollback that the same rule still counts against its limits.
        skip_batches: batches to skip after the rollback, in addition to those that failed.
        reseed: advance the random seeds, so that the same step is not repeated identically.
        run_again: run the steps again that this undoes, on the same batches and with the same seeds, where their batches are at hand.
            It pays where something else is changed as well, as the learning rate.
        before_onset: restore the newest snapshot from before a divergence began, verified or not, instead.
    """

    name: ClassVar[str] = "rollback"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = RESTORE

    depth: int = field(
        default=1, metadata=spec("which verified snapshot, 1 is the newest", unit="snapshots", ge=1, le=100)
    )
    deeper: bool = field(default=False, metadata=spec("go one snapshot deeper on every repetition"))
    skip_batches: int = field(
        default=0,
        metadata=spec("batches to skip afterwards, in addition to those that failed", unit="batches", ge=0, le=1e6),
    )
    reseed: bool = field(default=True, metadata=spec("advance the random seeds"))
    before_onset: bool = field(default=False, metadata=spec("restore the newest snapshot from before the onset of a divergence"))

    run_again: bool = field(default=False, metadata=spec("run the steps again that this undoes, where their batches are at hand"))

    def sentence(self) -> str:
        which = (
            "the newest snapshot from before the onset"
            if self.before_onset
            else "the newest verified snapshot"
            if self.depth == 1
            else f"verified snapshot number {self.depth} from the newest"
        )
        deeper = " (one deeper on every repetition)" if self.deeper else ""
        past = f", then skips {self.skip_batches} batches" if self.skip_batches else ""
        again = " and runs the steps since then again" if self.run_again else ""
        return f"rolls back to {which}{deeper}{again}{past}"


class Change(Action):
    """An action that changes the model or the optimizer between two steps."""

    __slots__ = ()
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE


@dataclass(frozen=True, slots=True)
class LowerLr(Change):
    """Multiply the learning rate of every optimizer by a factor, also under a schedule.

    Attributes:
        factor: the new rate divided by the old one.
        min_lr: lower bound. A rate that is already lower is not changed.
        cooldown: minimum number of steps between two reductions.
        recover_after: good steps after which the rate returns to what it would have been; None: it stays reduced. The
            latest reduction decides for all earlier ones, so one without `recover_after` makes them permanent.
        ramp: steps over which the rate returns.
        safe: share of the rate at which training diverged that the rate never exceeds again. It is not restored by steps then, but
            raised where a trial on the last steps shows that a higher one does better. Other causes set no such limit.
        max_update: largest first update after a rollback to the start, as a share of the weights. The factor is applied again until
            the update is predicted to be smaller; None: it is applied once.
    """

    name: ClassVar[str] = "lower_lr"

    factor: float = field(default=0.1, metadata=spec("new rate divided by old rate", gt=0, lt=1))
    min_lr: float = field(default=0.0, metadata=spec("lower bound on the learning rate", ge=0))
    cooldown: int = field(default=0, metadata=spec("minimum number of steps between two reductions", unit="steps", ge=0))
    recover_after: int | None = field(
        default=None, metadata=spec("good steps until the rate returns, never if omitted", unit="steps", ge=1)
    )
    ramp: int = field(default=100, metadata=spec("steps over which the rate returns", unit="steps", ge=0))
    safe: float = field(default=0.1, metadata=spec("largest share of a rate at which training diverged", gt=0, le=1))
    max_update: float | None = field(default=None, metadata=spec("largest first update, as a share of the weights", gt=0))

    def sentence(self) -> str:
        floor = f", never below {self.min_lr:g}" if self.min_lr else ""
        once = f", at most once in {self.cooldown} steps" if self.cooldown else ""
        back = f", and restores it after {self.recover_after} good steps over {self.ramp} steps" if self.recover_after else ""
        more = f", again where the first update would exceed {self.max_update:.0%} of the weights" if self.max_update else ""
        return f"multiplies the learning rate by {self.factor:g}{more}{floor}{once}{back}"


@dataclass(frozen=True, slots=True)
class Clip(Change):
    """Enable clipping by global gradient norm, or tighten it; or clip what stands out from the gradients of the run itself.

    Attributes:
        deviations: clip at the running mean of the gradient norm plus so many of its standard deviations, in the place of
            `global_clipnorm`, for as long as the run goes on.
        smoothing: share of the running mean and variance that one step leaves.
        global_clipnorm: the norm to clip at. A larger `global_clipnorm` of the optimizer is reduced to it.
        factor: multiplies a `global_clipnorm` of the optimizer that is already as small.
        min_clipnorm: lower bound on the norm to clip at.
    """

    name: ClassVar[str] = "clip"

    deviations: float | None = field(default=None, metadata=spec("standard deviations above the running mean of the norm", gt=0))
    smoothing: float = field(default=0.97, metadata=spec("share of the running mean that one step leaves", gt=0, lt=1))
    global_clipnorm: float = field(default=1.0, metadata=spec("norm to clip at", gt=0))
    factor: float = field(default=0.5, metadata=spec("multiplies a norm that is already as small", gt=0, le=1))
    min_clipnorm: float = field(default=1e-3, metadata=spec("lower bound on the norm to clip at", gt=0))

    ordered: ClassVar = (("min_clipnorm", "global_clipnorm"),)

    def sentence(self) -> str:
        if self.deviations is not None:
            return f"clips gradients from here on at the running mean of their global norm plus {self.deviations:g} standard deviations"
        return (
            f"clips gradients at global norm {self.global_clipnorm:g}, or at {self.factor:g} times the present norm where "
            f"that is already as small, never below {self.min_clipnorm:g}"
        )


@dataclass(frozen=True, slots=True)
class FixLossScale(Change):
    """Move the loss scale between a floor and a ceiling, and keep it there.

    Attributes:
        floor: lowest scale from now on.
        ceiling: highest scale from now on.
        reset_to: scale to restart from; None: the nearest one between floor and ceiling.
        growth_steps: good steps before the scale doubles; None: unchanged.
    """

    name: ClassVar[str] = "fix_loss_scale"

    floor: float = field(default=1.0, metadata=spec("lowest scale from now on", gt=0, le=2.0**100))
    ceiling: float = field(default=2.0**24, metadata=spec("highest scale from now on", gt=0, le=2.0**100))
    reset_to: float | None = field(default=None, metadata=spec("scale to restart from", gt=0, le=2.0**100))
    growth_steps: int | None = field(default=None, metadata=spec("good steps before the scale doubles", unit="steps", ge=1))

    ordered: ClassVar = (("floor", "ceiling"), ("floor", "reset_to"), ("reset_to", "ceiling"))

    def sentence(self) -> str:
        start = f" and restarts from {self.reset_to:g}" if self.reset_to is not None else ""
        growth = f", doubling after {self.growth_steps} good steps" if self.growth_steps is not None else ""
        return f"keeps the loss scale between {self.floor:g} and {self.ceiling:g}{start}{growth}"


@dataclass(frozen=True, slots=True)
class Repair(Change):
    """Overwrite the bad entries of weights, statistics and slots from `source`; the others stay unchanged."""

    name: ClassVar[str] = "repair"

    source: str = field(
        default="last_good",
        metadata=spec("what replaces bad entries", choices=("last_good", "zeros", "ones", "initializer")),
    )

    def sentence(self) -> str:
        sources = {"last_good": "from the last good state", "initializer": "from each variable's own initializer"}
        return f"overwrites bad entries {sources.get(self.source, f'with {self.source}')}"


@dataclass(frozen=True, slots=True)
class ResetBatchnorm(Change):
    """Reset the moving statistics of BatchNorm layers: to mean 0 and variance 1, or to the last good state."""

    name: ClassVar[str] = "reset_batchnorm"

    source: str = field(
        default="initial", metadata=spec("where the values come from", choices=("initial", "last_good"))
    )

    def sentence(self) -> str:
        return (
            f"resets BatchNorm statistics to their {'initial' if self.source == 'initial' else 'last good'} values"
        )


@dataclass(frozen=True, slots=True)
class RecalibrateBatchnorm(Change):
    """Re-estimate the moving statistics of BatchNorm layers over the next `batches` batches."""

    name: ClassVar[str] = "recalibrate_batchnorm"

    batches: int = field(default=100, metadata=spec("batches to estimate from", unit="batches", ge=1, le=1e6))

    def sentence(self) -> str:
        return f"re-estimates BatchNorm statistics over the next {self.batches} batches"


@dataclass(frozen=True, slots=True)
class ResetSlots(Change):
    """Reset optimizer slots (momentum, second moments) to their initial values: the bad ones, or all."""

    name: ClassVar[str] = "reset_slots"

    scope: str = field(default="bad", metadata=spec("which slots", choices=("bad", "all")))

    def sentence(self) -> str:
        return f"resets {'the bad' if self.scope == 'bad' else 'all'} optimizer slots to their initial values"


@dataclass(frozen=True, slots=True)
class Quarantine(Action):
    """Save the bad batch to disk for later inspection. Needs the guard's `directory`.

    Attributes:
        max_batches: maximum number of batches to save.
        max_mb: maximum size of them all, in megabytes.
    """

    name: ClassVar[str] = "quarantine"

    max_batches: int = field(default=20, metadata=spec("maximum number of batches to save", unit="batches", ge=1, le=1e6))
    max_mb: float = field(default=1024.0, metadata=spec("maximum size of them all", unit="MB", gt=0, le=1e7))

    def sentence(self) -> str:
        return f"saves the bad batch to disk (at most {self.max_batches} batches, {self.max_mb:g} MB)"


@dataclass(frozen=True, slots=True)
class Warn(Action):
    """Report the incident in one line, followed by `message`."""

    name: ClassVar[str] = "warn"

    message: str = field(default="", metadata=spec("text to append"))

    def sentence(self) -> str:
        return f"reports it in one line ({self.message})" if self.message else "reports it in one line"


@dataclass(frozen=True, slots=True)
class Ending(Action):
    """An action that ends training."""

    terminal: ClassVar[bool] = True
    phase: ClassVar[int] = END
    predicate: ClassVar[str] = ""

    restore: bool = field(default=True, metadata=spec("restore the last good state first"))

    def sentence(self) -> str:
        return f"{self.predicate}{' with the last good state restored' if self.restore else ''}"


@dataclass(frozen=True, slots=True)
class Stop(Ending):
    """End training gracefully, by default after restoring the last good state.

    Attributes:
        failed: put the worst values in place of all metrics of the epoch, so that a tuner never takes this trial for the best one.
    """

    name: ClassVar[str] = "stop"
    predicate: ClassVar[str] = "stops training"

    failed: bool = field(default=False, metadata=spec("log the worst values, for a tuner"))

    def sentence(self) -> str:
        return f"{Ending.sentence(self)}{', and logs the worst values for a tuner' if self.failed else ''}"


@dataclass(frozen=True, slots=True)
class RaiseError(Ending):
    """End training with a `NonFiniteError` that carries the incident, by default after restoring the last good state."""

    name: ClassVar[str] = "raise_error"
    predicate: ClassVar[str] = "raises NonFiniteError"


@dataclass(frozen=True, slots=True)
class Call(Action):
    """Call a function that was registered with the guard. A policy file names it and cannot define it."""

    name: ClassVar[str] = "call"

    function: str = field(metadata=spec("name under which the function was registered", pattern=NAME))

    def sentence(self) -> str:
        return f"calls {self.function!r}"


_REPAIRS = (Rollback, LowerLr, Clip, FixLossScale, Repair, ResetBatchnorm, RecalibrateBatchnorm, ResetSlots)
_ALL: tuple[type[Action], ...] = (Skip, *_REPAIRS, Quarantine, Warn, Stop, RaiseError, Call)

ACTIONS: dict[str, type[Action]] = {kind.name: kind for kind in _ALL}
"""Every action, by its name in policy files."""


def validated(item: Any) -> Action:
    """Return the action of an item that has been validated as part of a policy, without validating it again."""
    ((name, given),) = ({item: {}} if isinstance(item, str) else item).items()
    return construct(ACTIONS[name], given)


def to_file(action: Action) -> str | dict[str, Any]:
    """Return an action as `from_file` reads it, in its shortest form."""
    given = non_defaults(action)
    return {action.name: given} if given else action.name
