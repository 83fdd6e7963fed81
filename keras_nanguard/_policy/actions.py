"""What a policy can do, as frozen data: one class per action, one table of all of them.

Nothing here touches a model. An action says what shall be done; doing it is elsewhere, and ends as done or as
skipped with a reason. Level 0: imports no backend.

Example:

    >>> from keras_nanguard import actions
    >>> actions.LowerLr(factor=0.5).to_dict()["factor"]
    0.5
    >>> actions.from_file({"lower_lr": {"factor": 0.5}}) == actions.LowerLr(factor=0.5)
    True
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from keras_nanguard._policy.checking import check
from keras_nanguard._policy.fields import NAME, changed, made, spec

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

TELL, LEAVE_OUT, GO_BACK, CHANGE, END = range(5)
"""The order in which the actions of one decision are done, whatever the order in the file: first those that only tell
or keep, last those that end training; a rollback before what changes the state, so that it does not undo the change."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, as data.

    Attributes:
        name: the word for it in policy files and in decisions.
        terminal: whether training ends with it.
        changes: whether it changes the model, the optimizer or the course of training. Such an action needs a limit.
        phase: its place among the actions of one decision.
    """

    name: ClassVar[str] = ""
    terminal: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    phase: ClassVar[int] = TELL

    def __post_init__(self) -> None:
        check(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the action as a decision carries it: `action` and every parameter."""
        return {"action": self.name, **asdict(self)}

    def sentence(self) -> str:
        """Return what the action does, as the end of a sentence that starts with "the guard"."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Skip(Action):
    """Leave the refused step out and do nothing else."""

    name: ClassVar[str] = "skip"
    phase: ClassVar[int] = LEAVE_OUT

    def sentence(self) -> str:
        return "leaves the step out"


@dataclass(frozen=True, slots=True)
class Rollback(Action):
    """Go back to a verified snapshot, and on from there past the batches that failed.

    Attributes:
        depth: which verified snapshot: 1 is the newest, 2 the one before it. Too deep means the oldest there is.
        deeper: go one snapshot deeper for every rollback that the same rule still counts against its limits.
        skip_batches: batches to leave out after the rollback, on top of those that failed.
        reseed: move random seeds on, so that the same step is not run again blindly.
    """

    name: ClassVar[str] = "rollback"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = GO_BACK

    depth: int = field(
        default=1, metadata=spec("which verified snapshot, 1 is the newest", unit="snapshots", ge=1, le=100)
    )
    deeper: bool = field(default=False, metadata=spec("one snapshot deeper on every repetition"))
    skip_batches: int = field(
        default=0,
        metadata=spec("batches to leave out afterwards, besides those that failed", unit="batches", ge=0, le=1e6),
    )
    reseed: bool = field(default=True, metadata=spec("move the random seeds on"))

    def sentence(self) -> str:
        which = (
            "the newest verified snapshot"
            if self.depth == 1
            else f"verified snapshot number {self.depth} from the newest"
        )
        deeper = " (one deeper on every repetition)" if self.deeper else ""
        past = f", then leaves {self.skip_batches} batches out" if self.skip_batches else ""
        return f"goes back to {which}{deeper}{past}"


@dataclass(frozen=True, slots=True)
class LowerLr(Action):
    """Multiply the learning rate of every optimizer by a factor, also under a schedule.

    Attributes:
        factor: the new rate divided by the old one.
        min_lr: the rate is never lowered below this; one that is already lower stays.
        cooldown: not again within this many steps.
        recover_after: good steps after which the rate returns to what it would have been; None: it stays low. The
            newest lowering decides for all earlier ones, so one without `recover_after` makes them permanent.
        ramp: steps over which it returns.
    """

    name: ClassVar[str] = "lower_lr"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    factor: float = field(default=0.1, metadata=spec("new rate divided by old rate", gt=0, lt=1))
    min_lr: float = field(default=0.0, metadata=spec("lowest rate", ge=0))
    cooldown: int = field(default=0, metadata=spec("not again within", unit="steps", ge=0))
    recover_after: int | None = field(
        default=None, metadata=spec("good steps until the rate returns, never if left out", unit="steps", ge=1)
    )
    ramp: int = field(default=100, metadata=spec("steps over which it returns", unit="steps", ge=0))

    def sentence(self) -> str:
        floor = f", never below {self.min_lr:g}" if self.min_lr else ""
        once = f", at most once in {self.cooldown} steps" if self.cooldown else ""
        back = f", back up after {self.recover_after} good steps over {self.ramp} steps" if self.recover_after else ""
        return f"multiplies the learning rate by {self.factor:g}{floor}{once}{back}"


@dataclass(frozen=True, slots=True)
class Clip(Action):
    """Turn clipping by global gradient norm on, or tighten it.

    Attributes:
        global_clipnorm: the norm to clip at where nothing is clipped yet; a looser one is brought down to it.
        factor: a norm that is already as tight is multiplied by this.
        min_clipnorm: never tighter than this.
    """

    name: ClassVar[str] = "clip"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    global_clipnorm: float = field(default=1.0, metadata=spec("norm to clip at", gt=0))
    factor: float = field(default=0.5, metadata=spec("how much tighter where it already clips", gt=0, le=1))
    min_clipnorm: float = field(default=1e-3, metadata=spec("never tighter than", gt=0))

    ordered: ClassVar = (("min_clipnorm", "global_clipnorm"),)

    def sentence(self) -> str:
        return (
            f"clips gradients at global norm {self.global_clipnorm:g}, or {self.factor:g} times what it was where that "
            f"is tighter, never below {self.min_clipnorm:g}"
        )


@dataclass(frozen=True, slots=True)
class FixLossScale(Action):
    """Bring the loss scale back between a floor and a ceiling, and keep it there.

    Attributes:
        floor: lowest scale from now on.
        ceiling: highest scale from now on.
        reset_to: scale to start again from; None: the nearest one between floor and ceiling.
        growth_steps: good steps before the scale doubles; None: as it was.
    """

    name: ClassVar[str] = "fix_loss_scale"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    floor: float = field(default=1.0, metadata=spec("lowest scale from now on", gt=0, le=2.0**100))
    ceiling: float = field(default=2.0**24, metadata=spec("highest scale from now on", gt=0, le=2.0**100))
    reset_to: float | None = field(default=None, metadata=spec("scale to start again from", gt=0, le=2.0**100))
    growth_steps: int | None = field(default=None, metadata=spec("good steps before it doubles", unit="steps", ge=1))

    ordered: ClassVar = (("floor", "ceiling"), ("floor", "reset_to"), ("reset_to", "ceiling"))

    def sentence(self) -> str:
        start = f" and starts again from {self.reset_to:g}" if self.reset_to is not None else ""
        growth = f", doubling after {self.growth_steps} good steps" if self.growth_steps is not None else ""
        return f"keeps the loss scale between {self.floor:g} and {self.ceiling:g}{start}{growth}"


@dataclass(frozen=True, slots=True)
class Repair(Action):
    """Overwrite the bad entries of weights, statistics and slots from `source`, and leave the good ones."""

    name: ClassVar[str] = "repair"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    source: str = field(
        default="last_good",
        metadata=spec("what to write over bad entries", choices=("last_good", "zeros", "ones", "initializer")),
    )

    def sentence(self) -> str:
        words = {"last_good": "from the last good state", "initializer": "from each variable's own initializer"}
        return f"overwrites bad entries {words.get(self.source, f'with {self.source}')}"


@dataclass(frozen=True, slots=True)
class ResetBatchnorm(Action):
    """Set the moving statistics of BatchNorm layers back: to mean 0 and variance 1, or to the last good state."""

    name: ClassVar[str] = "reset_batchnorm"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    source: str = field(
        default="initial", metadata=spec("where the values come from", choices=("initial", "last_good"))
    )

    def sentence(self) -> str:
        return (
            f"sets BatchNorm statistics back to their {'initial' if self.source == 'initial' else 'last good'} values"
        )


@dataclass(frozen=True, slots=True)
class RecalibrateBatchnorm(Action):
    """Estimate the moving statistics of BatchNorm layers anew over the next `batches` batches."""

    name: ClassVar[str] = "recalibrate_batchnorm"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    batches: int = field(default=100, metadata=spec("batches to estimate from", unit="batches", ge=1, le=1e6))

    def sentence(self) -> str:
        return f"estimates BatchNorm statistics anew over the next {self.batches} batches"


@dataclass(frozen=True, slots=True)
class ResetSlots(Action):
    """Set optimizer slots (momentum, second moments) back to their initial values: the bad or all."""

    name: ClassVar[str] = "reset_slots"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE

    scope: str = field(default="bad", metadata=spec("which slots", choices=("bad", "all")))

    def sentence(self) -> str:
        return f"sets {'the bad' if self.scope == 'bad' else 'all'} optimizer slots back to their initial values"


@dataclass(frozen=True, slots=True)
class Quarantine(Action):
    """Keep the bad batch on disk, to look at later. Needs the guard's `directory`.

    Attributes:
        max_batches: keep at most so many.
        max_mb: and at most so many megabytes in all.
    """

    name: ClassVar[str] = "quarantine"

    max_batches: int = field(default=20, metadata=spec("most batches to keep", unit="batches", ge=1, le=1e6))
    max_mb: float = field(default=1024.0, metadata=spec("most space they take", unit="MB", gt=0, le=1e7))

    def sentence(self) -> str:
        return f"keeps the bad batch on disk (at most {self.max_batches} batches, {self.max_mb:g} MB)"


@dataclass(frozen=True, slots=True)
class Warn(Action):
    """Tell it in one line, with the words of `message` added."""

    name: ClassVar[str] = "warn"

    message: str = field(default="", metadata=spec("words to add"))

    def sentence(self) -> str:
        return f"tells it in one line ({self.message})" if self.message else "tells it in one line"


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """End training gracefully, by default with the last good state put back first."""

    name: ClassVar[str] = "stop"
    terminal: ClassVar[bool] = True
    phase: ClassVar[int] = END

    restore: bool = field(default=True, metadata=spec("put the last good state back first"))

    def sentence(self) -> str:
        return f"stops training{' with the last good state restored' if self.restore else ''}"


@dataclass(frozen=True, slots=True)
class RaiseError(Action):
    """End training with a `NonFiniteError` that carries the incident, by default with the last good state put back."""

    name: ClassVar[str] = "raise_error"
    terminal: ClassVar[bool] = True
    phase: ClassVar[int] = END

    restore: bool = field(default=True, metadata=spec("put the last good state back first"))

    def sentence(self) -> str:
        return f"raises NonFiniteError{' with the last good state restored' if self.restore else ''}"


@dataclass(frozen=True, slots=True)
class Call(Action):
    """Call a function that was registered with the guard by name. A policy file names it and cannot define it."""

    name: ClassVar[str] = "call"

    function: str = field(metadata=spec("name under which it was registered", pattern=NAME))

    def sentence(self) -> str:
        return f"calls {self.function!r}"


_REPAIRS = (Rollback, LowerLr, Clip, FixLossScale, Repair, ResetBatchnorm, RecalibrateBatchnorm, ResetSlots)
_ALL: tuple[type[Action], ...] = (Skip, *_REPAIRS, Quarantine, Warn, Stop, RaiseError, Call)

ACTIONS: dict[str, type[Action]] = {kind.name: kind for kind in _ALL}
"""Every action by its name in policy files."""


def validated(item: Any) -> Action:
    """Return the same action, of an item that has been validated as part of a policy."""
    ((name, given),) = ({item: {}} if isinstance(item, str) else item).items()
    return made(ACTIONS[name], given)


def to_file(action: Action) -> str | dict[str, Any]:
    """Return an action as `from_file` reads it, in its shortest form."""
    given = changed(action)
    return {action.name: given} if given else action.name
