"""The base of every record of a policy: a frozen pydantic model that raises `PolicyError`, with
every problem as a sentence: its path, and the nearest known word.

JSON Schema, defaults, validation and the fields of a policy file all come from these models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)
from typing_extensions import Self

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._core.literals import Cause, Kind, Site
from keras_nanguard._core.plain_values import printable

MAX_LENGTH = 80
"""Length above which a value is shortened in a message."""

MAX_LINES = 30
"""Number of problems that a message lists; `PolicyError.problems` has all of them."""


def problem(path: str, what: str, received: object, meant: str = "") -> str:
    """Return one problem: `path: expected what, received value, did you mean 'meant'?`."""
    tail = f", did you mean {meant!r}?" if meant else ""
    return f"{path}: expected {what}, received {safe_repr(received)}{tail}"


def raise_problems(problems: Iterable[str], source: str = "the policy") -> None:
    """Raise one `PolicyError` with all `problems`; do nothing if there are none."""
    found = tuple(problems)
    if len(found) == 1:
        raise PolicyError(f"{source[:1].upper()}{source[1:]}: {found[0]}", found)
    if found:
        more = ["..."] if len(found) > MAX_LINES else []
        lines = "\n".join(f"  {line}" for line in (*found[:MAX_LINES], *more))
        raise PolicyError(f"{len(found)} problems in {source}:\n{lines}", found)


def raise_invalid(error: ValidationError, document: Any, model: Any, source: str) -> None:
    """Raise one `PolicyError` with each error of pydantic as one problem.

    A list whose entries are invalid is not too short as well.

    Args:
        document: the validated document.
        source: name of the document.
    """
    found = error.errors(include_url=False)
    within = {one["loc"][:n] for one in found for n in range(len(one["loc"]))}
    own = (e for e in found if e["type"] != "too_short" or e["loc"] not in within)
    raise_problems((_sentence(one, document, model) for one in own), source)


def _sentence(error: Mapping[str, Any], document: Any, model: Any) -> str:
    place, context = error["loc"], error.get("ctx", {})
    path = _path(place, document)
    if error["type"] == "missing":
        return f"{path}: expected a value, received nothing"
    if context.get("class_name") == "ActionTable":
        what = "the name of an action, or a table with its parameters"
        return problem(path, what, error["input"])
    if error["type"] == "too_short":
        return f"{path}: expected at least one, received none"
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, place[:-1])
        words = f"one of {', '.join(known)}"
        return problem(path, words, place[-1], nearest(place[-1], known))
    if error["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        words = f"one of {', '.join(known)}" if len(known) > 1 else context["expected"]
        return problem(path, words, error["input"], nearest(error["input"], known))
    if error["type"] in _WORDS:
        return problem(path, _WORDS[error["type"]].format(**context), error["input"])
    what = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return problem(path, what[:1].lower() + what[1:], error["input"])


_WORDS = {
    "bool_type": "true or false",
    "string_too_short": "a text that is not empty",
    "string_too_long": "a text of at most {max_length} characters",
    "string_pattern_mismatch": "a name of at most 64 letters, digits, spaces, '_', '-' and '.'",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "tuple_type": "a list",
    "invalid_key": "text as keys",
}
"""The expected value for the types of error whose sentence of pydantic is about Python, or no noun;
other types keep it.
"""


def _path(place: Sequence[str | int], document: Any) -> str:
    """Return the path as the file has it: `rules[0].do[1].lower_lr.factor`.

    A single value that stands for a list has no number.
    """
    path, inside = "", document
    for part in place:
        if isinstance(part, int):
            if isinstance(inside, (list, tuple)):
                path += f"[{part}]"
                inside = inside[part] if part < len(inside) else None
            continue
        plain = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        segment = part if plain else f'"{safe_repr(part)[1:-1]}"'
        if isinstance(inside, str):  # the name of an action, in the place of its table
            segment = "" if inside == part else segment
        path += f".{segment}" if path and segment else segment
        inside = inside.get(part) if isinstance(inside, Mapping) else None
    return path or "the policy"


def _fields_at(model: Any, place: Sequence[str | int]) -> list[str]:
    """Return the fields of the model at a place of a document."""
    for part in place:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[Any]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word that is nearest to `word` in spelling, `""` if none is near."""
    words = {name.lower().replace("-", "_"): name for name in known}
    if not isinstance(word, str) or word in words.values():
        return ""
    key = word.lower()[:64].replace("-", "_").replace(" ", "_")
    found = difflib.get_close_matches(key, words, n=1, cutoff=0.7)
    return words[found[0]] if found else ""


def safe_repr(value: object) -> str:
    """Return a value as one short line of ASCII, also if it comes from an untrusted file."""
    try:
        text = ascii(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return f"a {type(value).__name__} with a whole number that has thousands of digits"
    if len(text) <= MAX_LENGTH:
        return text
    return f"{text[:30]}...{text[-30:]} ({len(text)} characters)"


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
            raise_invalid(error, given, cls, cls.__name__)


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

    def replaced(self, **changes: Any) -> Self:
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


def _printable(text: str) -> str:
    """Return the text of a file if it can be printed and written into a file again."""
    plain = text.expandtabs()
    if printable(plain) != plain:
        raise ValueError("printable characters; in a glob, ? stands for any other one")
    return text


Text = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
"""A short text without characters that control a terminal, reorder a line or have no encoding."""


def several(kind: Any, written: Callable[[tuple[Any, ...]], Any] = unlisted) -> Any:
    """Return the type of one value of this kind or a list of them, as a tuple.

    Args:
        written: returns the values as a file writes them.
    """
    return Annotated[
        tuple[kind, ...],
        BeforeValidator(listed, json_schema_input_type=kind | list[kind]),
        PlainSerializer(written, when_used="json"),
    ]


if TYPE_CHECKING:
    Causes = tuple[Cause, ...]
    Sites = tuple[Site, ...]
    Kinds = tuple[Kind, ...]
    Globs = tuple[str, ...]
else:
    Causes, Sites, Kinds = several(Cause), several(Site), several(Kind)
    Glob = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
    Globs = several(Glob)
