"""The base of every record of a policy: a frozen pydantic model that raises `PolicyError`.

JSON Schema, defaults, validation and the fields of a policy file all come from these models.
Imports no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._core.literals import Cause, Kind, Site
from keras_nanguard._policy.problems import problems_of, raise_problems, safe_repr

R = TypeVar("R", bound="Record")


class _RaisesPolicyError(type(BaseModel)):  # type: ignore[misc]  # the metaclass of pydantic
    """Reports problems of a record that is created in code like those of a record in a file."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if args:
            remedy = f"Write {cls.__name__}(field=value)."
            if cls.__name__ == "Policy":
                remedy = f"Write Policy.load({safe_repr(args[0])})."
            received = f"{cls.__name__}({safe_repr(args[0])})"
            raise PolicyError(expected("the fields of a record by name", received, remedy))
        try:
            return super().__call__(**given)
        except ValidationError as error:
            raise_problems(problems_of(error, given, cls), cls.__name__)


if TYPE_CHECKING:
    _Base = BaseModel
else:

    class _Base(BaseModel, metaclass=_RaisesPolicyError):
        """A model whose errors are a `PolicyError`."""


class Record(_Base):
    """A frozen record: no unknown fields, no conversions of types, no NaN.

    Raises:
        PolicyError: if a field is unknown, missing or has another value than its description
            allows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def replaced(self: R, **changes: Any) -> R:
        """Return a copy with some fields replaced; their values are not validated."""
        return self.model_copy(update=changes)


def listed(value: Any) -> Any:
    """Return one value or a list of them as a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def unlisted(values: tuple[Any, ...]) -> Any:
    """Return a tuple as a file writes it: one value alone, several as a list."""
    return values[0] if len(values) == 1 else list(values)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]{0,63}$")]
"""The name of a rule or of a registered function."""

Steps = Annotated[int, Field(ge=0, le=10**9)]
"""A number of steps."""

_UNLISTED = PlainSerializer(unlisted, when_used="json")

Causes = Annotated[
    tuple[Cause, ...],
    BeforeValidator(listed, json_schema_input_type=Cause | list[Cause]),
    _UNLISTED,
]
Sites = Annotated[
    tuple[Site, ...],
    BeforeValidator(listed, json_schema_input_type=Site | list[Site]),
    _UNLISTED,
]
Kinds = Annotated[
    tuple[Kind, ...],
    BeforeValidator(listed, json_schema_input_type=Kind | list[Kind]),
    _UNLISTED,
]
_Glob = Annotated[str, Field(min_length=1, max_length=200)]
Globs = Annotated[
    tuple[_Glob, ...],
    BeforeValidator(listed, json_schema_input_type=_Glob | list[_Glob]),
    _UNLISTED,
]
"""One value or a list of them."""
