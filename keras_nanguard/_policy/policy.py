"""`Policy`: the policy of a guard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

import tomli_w
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from typing_extensions import Unpack

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._core.literals import Preset
from keras_nanguard._core.plain_values import check_depth, times
from keras_nanguard._policy.actions import Action, Items, LowerLr, Rollback, Skip, Stop
from keras_nanguard._policy.documents import MAX_DEPTH, SUFFIXES, parsed, read
from keras_nanguard._policy.records import (
    Record,
    as_tuple,
    nearest,
    raise_invalid,
    safe_repr,
)
from keras_nanguard._policy.settings import (
    Divergence,
    Limit,
    LossScale,
    Rule,
    Snapshot,
    Statistics,
    matches_path,
)

VERSION: Literal[2] = 2
"""Version of the form of policy files."""

PRESETS: tuple[str, ...] = get_args(Preset)
"""The policies that come with the package."""

DEFAULT_PRESET: Preset = "recover"
"""The preset of a policy that names none."""


class Sections(TypedDict, total=False):
    """The sections of a policy as keyword arguments."""

    preset: Preset
    refuse: bool
    escalation: Any
    max_consecutive_refused: int
    max_refused_share: float
    action_budget: int
    lower_lr: Any
    rollback: Any
    snapshot: Any
    divergence: Any
    loss_scale: Any
    statistics: Any
    limits: Any
    rules: Any


SECTIONS = tuple(Sections.__annotations__)
"""The sections of a policy."""

_Stages = Annotated[tuple[Items, ...], BeforeValidator(as_tuple)]
_Limits = Annotated[tuple[Limit, ...], BeforeValidator(as_tuple)]
_Rules = Annotated[tuple[Rule, ...], BeforeValidator(as_tuple)]

_BACK_AND_SLOWER = (Rollback(), LowerLr())
_ROUND: tuple[tuple[Action, ...], ...] = ((Skip(),), (Skip(),), _BACK_AND_SLOWER)


class Policy(Record):
    """What the guard does about bad steps.

    Create one with `Policy.load`. `print(policy)` shows it as a policy file.
    """

    version: Literal[2] = Field(default=VERSION, description="version of the policy format")
    preset: Preset = Field(default=DEFAULT_PRESET, description="the policy to start from")
    refuse: bool = Field(default=True, description="whether bad steps are refused")
    escalation: _Stages = Field(
        default=(*_ROUND, *_ROUND, *_ROUND, (Stop(),)),
        min_length=1,
        description="actions for the first, second, ... bad step in a row",
    )
    max_consecutive_refused: int = Field(
        default=12, ge=1, le=10**6, description="bad steps in a row at which training ends"
    )
    max_refused_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of refused steps among the last 200 at which training ends",
    )
    action_budget: int = Field(
        default=6, ge=1, le=10**6, description="how often each change may be made within 5000 steps"
    )
    lower_lr: LowerLr = Field(default=LowerLr(), description="defaults of the action `lower_lr`")
    rollback: Rollback = Field(default=Rollback(), description="defaults of the action `rollback`")
    snapshot: Snapshot = Field(default=Snapshot(), description="how snapshots are taken")
    divergence: Divergence = Field(
        default=Divergence(), description="divergence without NaN or Inf"
    )
    loss_scale: LossScale = Field(
        default=LossScale(), description="the loss scale of mixed_float16"
    )
    statistics: Statistics = Field(
        default=Statistics(), description="the statistics of BatchNormalization"
    )
    limits: _Limits = Field(default=(), description="limits on the magnitude of finite numbers")
    rules: _Rules = Field(default=(), description="rules for some incidents")

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        name = given.get("preset", DEFAULT_PRESET)
        below = _preset(name) if isinstance(name, str) and name in PRESETS else {}
        return merged(below, given)

    @field_validator("rules")
    @classmethod
    def _one_rule_of_each_name(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        names = [rule.name for rule in rules]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"one rule named {twice!r}")
        return rules

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | Policy = DEFAULT_PRESET,
        **sections: Unpack[Sections],
    ) -> Policy:
        """Return the policy of a preset, a file, a dict or a policy.

        Args:
            source: name of a preset; path of a `.toml`, `.yaml`, `.yml` or `.json` file; a dict of
                the same form; or a `Policy`.
            sections: sections of a policy, merged over the source: `snapshot={"every": 50}`.

        Raises:
            PolicyError: with every problem found, each with its path; or if `source` is a `Policy`,
                which has every field, and `preset` another one.
        """
        if isinstance(source, Policy):
            preset = sections.get("preset", source.preset)
            if preset != source.preset:
                what, shown = "no other preset for a whole policy", safe_repr(preset)
                remedy = f"Write Policy.load({shown}, ...) to start from another preset."
                raise PolicyError(expected(what, f"preset={shown}", remedy))
            if not sections:
                return source
            made = cls._of(merged(source.to_dict(), sections), _ARGUMENTS)
            given: Any = sections.get("snapshot", {})
            chosen = source.snapshot.model_fields_set
            if isinstance(given, Mapping) and not {"storage"} & {*given, *chosen}:
                # A run that resumes may set what nobody has set.
                made.snapshot.model_fields_set.discard("storage")
            return made
        document, name = read_document(source)
        return cls._of(merged(document, sections), _ARGUMENTS if sections else name)

    @classmethod
    def _of(cls, document: Mapping[str, Any], name: str) -> Policy:
        """Return the policy of a whole document; `name` is its name in messages."""
        try:
            check_depth(document, MAX_DEPTH)
        except ValueError:
            what, remedy = f"at most {MAX_DEPTH} levels of nesting in {name}", "Simplify it."
            raise PolicyError(expected(what, "more", remedy)) from None
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise_invalid(error, document, cls, name)
            raise

    @property
    def ending(self) -> Action:
        """The action that ends training: the first such action of the escalation, else `stop`."""
        actions = (action for stage in self.escalation for action in stage if action.terminal)
        return next(actions, Stop())

    def max_abs(self, path: str, site: str) -> float | None:
        """Return the largest allowed magnitude of a variable, `None` if unlimited.

        If several limits match, the last one applies.

        Args:
            path: its Keras path.
            site: `weights`, `statistics` or `slots`.
        """
        found = (
            limit.max_abs
            for limit in reversed(self.limits)
            if limit.site == site and any(matches_path(path, glob) for glob in limit.layer)
        )
        return next(found, None)

    def to_dict(self) -> dict[str, Any]:
        """Return the complete policy as plain values, in the form that `load` reads."""
        document = self.model_dump(mode="json")
        for name in ("limits", "rules"):
            items = getattr(self, name)
            document[name] = [item.model_dump(mode="json", exclude_defaults=True) for item in items]
        return {name: value for name, value in document.items() if value != []}

    def to_toml(self) -> str:
        """Return the policy as a TOML file."""
        return tomli_w.dumps(self.to_dict())

    def __repr__(self) -> str:
        return f"Policy(preset={self.preset!r}, {times(len(self.rules), 'rule')})"

    def __str__(self) -> str:
        return self.to_toml()


_ARGUMENTS = "the sections given as arguments"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return one document merged over another.

    Tables are merged field by field. A rule replaces the whole rule of the same name, and new rules
    come first. Any other field replaces the field below.
    """
    found = {**below, **above}
    for name, section in above.items():
        under = below.get(name)
        if isinstance(section, Mapping) and isinstance(under, Mapping):
            found[name] = {**under, **section}
        elif name == "rules" and _are_rules(section) and _are_rules(under):
            names = [_name(rule) for rule in section]
            found[name] = (*section, *(rule for rule in under or () if _name(rule) not in names))
    return found


def _are_rules(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _name(rule: Any) -> Any:
    return rule.get("name") if isinstance(rule, Mapping) else getattr(rule, "name", None)


@cache
def _preset(name: str) -> Mapping[str, Any]:
    """Return the document of a preset. It is cached and shared: do not modify it."""
    if name == DEFAULT_PRESET:
        return {}  # what the fields have by default; a test compares it with the file
    text = Path(__file__).parents[1].joinpath("policies", f"{name}.toml").read_text("utf-8")
    return parsed(text, ".toml", name)


def read_document(source: Any) -> tuple[Mapping[str, Any], str]:
    """Return the document of a source, and its name in messages."""
    if isinstance(source, str) and source in PRESETS:
        return {"preset": source}, "the policy"
    if isinstance(source, Mapping):
        return source, "the policy"
    what = f"a policy: the name of a preset ({', '.join(PRESETS)}), a file, a dict or a Policy"
    if not isinstance(source, (str, os.PathLike)):
        received, remedy = safe_repr(source), f"Write {DEFAULT_PRESET!r} for the default."
        if isinstance(source, type):
            received, remedy = f"the class {source.__name__}", "Write Policy.load('recover')."
        raise PolicyError(expected(what, received, remedy))
    path = os.fsdecode(source)
    if os.path.isdir(path):
        remedy = f"Write NanGuard(directory={safe_repr(path)}) for a folder to write into."
        raise PolicyError(expected(what, f"{safe_repr(path)}, a directory", remedy))
    is_path = os.path.splitext(path)[1].lower() in SUFFIXES or os.sep in path
    if is_path or not isinstance(source, str):
        return read(source), safe_repr(path)
    meant = nearest(path, PRESETS)
    remedy = f"Did you mean {meant!r}?" if meant else f"A file ends in {', '.join(SUFFIXES)}."
    raise PolicyError(expected(what, safe_repr(path), remedy))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file, which editors use for completion."""
    schema = Policy.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
