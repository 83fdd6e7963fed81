"""The actions of a policy, as frozen data: one class for each action, and one table of all of them.

Nothing here touches a model. An action describes what to do; `_fit/perform.py` does it and records
an outcome, done or skipped with a reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from keras_nanguard._policy.records import Name, Record, Steps, Text, several, unlisted

__all__ = [
    "ACTIONS",
    "Action",
    "Call",
    "Clip",
    "FixLossScale",
    "LowerLr",
    "RaiseError",
    "RecalibrateBatchnorm",
    "Repair",
    "ResetBatchnorm",
    "ResetSlots",
    "Rollback",
    "Skip",
    "Stop",
    "Warn",
]

REPORT, SKIP, RESTORE, CHANGE, END = range(5)
"""Phases: the order in which the actions of one decision run, regardless of their order in the
file.

Actions that only report come first and endings last. A rollback precedes changes of the state, so
that it does not undo them.
"""


class Action(Record):
    """An action, as data.

    Attributes:
        name: its name in policy files and in decisions.
        terminal: whether it ends training.
        changes: whether it changes the model, the optimizer or the course of training.
            `action_budget` limits how often it is done.
        phase: when it runs, relative to the other actions of the same decision.
    """

    name: ClassVar[str] = ""
    terminal: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    phase: ClassVar[int] = REPORT

    def to_file(self) -> str | dict[str, Any]:
        """Return the form in a policy file: the name, or a table of the given parameters."""
        given = self.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        return {self.name: given} if given else self.name


class Skip(Action):
    """Skip the refused step and do nothing else."""

    name: ClassVar[str] = "skip"
    phase: ClassVar[int] = SKIP


class Rollback(Action):
    """Restore a verified snapshot and continue after the batches that failed."""

    name: ClassVar[str] = "rollback"
    changes: ClassVar[bool] = True
    phase: ClassVar[int] = RESTORE

    further_back: bool = Field(
        default=True, description="go further back if the last rollback brought no progress"
    )
    skip_batches: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="batches to skip, in addition to those that failed",
    )
    replay_steps: bool = Field(
        default=False, description="replay the undone steps if their batches are still in memory"
    )


class Change(Action):
    """An action that changes the model or the optimizer between two steps."""

    changes: ClassVar[bool] = True
    phase: ClassVar[int] = CHANGE


class LowerLr(Change):
    """Multiply the learning rate of every optimizer by a factor, also under a schedule."""

    name: ClassVar[str] = "lower_lr"

    factor: float = Field(default=0.1, gt=0, lt=1, description="new rate divided by old rate")
    min_lr: float = Field(default=1e-7, ge=0, description="lower bound on the learning rate")
    recover_after: Steps = Field(
        default=500, description="good steps after which the rate returns, 0 is never"
    )


class Clip(Change):
    """Enable clipping by global gradient norm, or tighten it."""

    name: ClassVar[str] = "clip"

    global_clipnorm: float = Field(default=1.0, gt=0, description="maximum norm")
    factor: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="multiplies the optimizer's norm if that is already at most `global_clipnorm`",
    )
    min_clipnorm: float = Field(
        default=1e-3, gt=0, description="lower bound on the norm to clip at"
    )


class FixLossScale(Change):
    """Set the loss scale to a value in the range of `[loss_scale]`, and keep it there."""

    name: ClassVar[str] = "fix_loss_scale"

    reset_to: float | None = Field(
        default=None,
        gt=0,
        le=2.0**100,
        description="new scale; the nearest bound if omitted",
    )
    growth_steps: int | None = Field(
        default=None, ge=1, description="good steps before the scale doubles; unchanged if omitted"
    )


class Repair(Change):
    """Overwrite the bad entries of weights, statistics and slots; the others stay unchanged."""

    name: ClassVar[str] = "repair"

    source: Literal["last_good", "zeros", "ones", "initializer"] = Field(
        default="last_good", description="replacement of bad entries"
    )


class ResetBatchnorm(Change):
    """Reset the moving statistics of BatchNormalization to mean 0 and variance 1, or to the last
    good values.
    """

    name: ClassVar[str] = "reset_batchnorm"

    source: Literal["initial", "last_good"] = Field(
        default="initial", description="source of the values"
    )


class RecalibrateBatchnorm(Change):
    """Re-estimate the moving statistics of BatchNormalization from the last good batches."""

    name: ClassVar[str] = "recalibrate_batchnorm"

    batches: int = Field(
        default=100, ge=1, le=10**6, description="maximum number of batches, of those in memory"
    )


class ResetSlots(Change):
    """Reset optimizer slots (momentum, second moments) to their initial values."""

    name: ClassVar[str] = "reset_slots"

    scope: Literal["bad", "all"] = Field(default="bad", description="which slots")


class Warn(Action):
    """Report the incident in one line, followed by `message`."""

    name: ClassVar[str] = "warn"

    message: Text = Field(default="", description="text to append")


class Ending(Action):
    """An action that ends training."""

    terminal: ClassVar[bool] = True
    phase: ClassVar[int] = END

    restore: bool = Field(default=True, description="restore the last good state first")


class Stop(Ending):
    """End training gracefully, by default with the last good state restored."""

    name: ClassVar[str] = "stop"

    log_worst_metrics: bool = Field(
        default=False,
        description="log the worst value of each metric, so that no tuner picks this run",
    )


class RaiseError(Ending):
    """End training with a `NonFiniteError` that carries the incident."""

    name: ClassVar[str] = "raise_error"


class Call(Action):
    """Call a function that was registered with the guard; a policy file only names it."""

    name: ClassVar[str] = "call"

    function: Name = Field(description="name under which the function was registered")


ACTIONS: dict[str, type[Action]] = {
    kind.name: kind
    for kind in (
        *(Skip, Rollback, LowerLr, Clip, FixLossScale, Repair),
        *(ResetBatchnorm, RecalibrateBatchnorm, ResetSlots, Warn, Stop, RaiseError, Call),
    )
}
"""Every action, by its name in policy files."""


# How a policy file writes actions

_FIELDS: dict[str, Any] = {
    name: (kind, Field(default=None, description=kind.__doc__)) for name, kind in ACTIONS.items()
}
ActionTable: Any = create_model(
    "ActionTable",
    __base__=Record,
    __doc__="One action with its parameters: a table with its name as the only key.",
    __cls_kwargs__={"json_schema_extra": {"minProperties": 1, "maxProperties": 1}},
    **_FIELDS,
)


def _table(item: Any) -> Any:
    """Return an action, or the name of one, as a table."""
    if isinstance(item, Action):
        return {item.name: item}
    return {item: {}} if isinstance(item, str) else item


def _only(table: Any) -> Any:
    """Return the action of a table."""
    if len(table.model_fields_set) != 1:
        raise ValueError("one action in each table; write several as a list")
    return getattr(table, *table.model_fields_set)


def as_file(actions: tuple[Action, ...]) -> Any:
    """Return actions as a policy file writes them: one alone, several as a list."""
    return unlisted(tuple(action.to_file() for action in actions))


if TYPE_CHECKING:
    Item = Action
    Items = tuple[Action, ...]
else:
    Item = Annotated[
        ActionTable,
        BeforeValidator(_table, json_schema_input_type=Literal[tuple(ACTIONS)] | ActionTable),
        AfterValidator(_only),
    ]
    Items = Annotated[several(Item, as_file), Field(min_length=1)]
"""One action, and one action or a list of them: each a name or a table of parameters."""
