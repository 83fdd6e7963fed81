"""Names of the arrays of a batch: paths within the batch, and the names that the user knows. Imports no backend."""

from __future__ import annotations

from typing import Any

__all__ = ["argument_path", "input_names", "named"]

GENERATED_PREFIXES = ("keras_tensor", "input_layer")
"""Prefixes of the names that Keras generates for inputs without a name."""

ROLES = {"inputs": "x", "targets": "y"}
"""Arguments of `fit`, by the role of their arrays."""


def input_names(model: Any) -> tuple[str, ...]:
    """Return the name of each `keras.Input` of a functional model, `""` for generated names; `()` for other models."""
    names = [str(getattr(tensor, "name", "")) for tensor in getattr(model, "inputs", None) or ()]
    return tuple("" if name.startswith(GENERATED_PREFIXES) else name for name in names)


def named(path: str, names: tuple[str, ...]) -> str:
    """Return the path of an array of the inputs (`inputs/1`, `x`) with the name of its `keras.Input` in place of its number."""
    role, _, rest = path.partition("/")
    number = int(rest) if rest.isdecimal() else 0 if not rest and len(names) == 1 else len(names)
    return f"{role}/{names[number]}" if role in ("inputs", "x") and number < len(names) and names[number] else path


def argument_path(path: str) -> str:
    """Return the path of an array of the batch by the arguments of `fit`: `x`, `x/age`, `y`."""
    role, slash, rest = path.partition("/")
    return ROLES.get(role, role) + slash + rest
