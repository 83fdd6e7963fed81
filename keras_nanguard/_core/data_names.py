"""What the arrays of a batch are called: by the place they have in it, and as the user calls them. Level 0: imports no backend."""

from __future__ import annotations

from typing import Any

__all__ = ["input_names", "named", "shown"]

OF_KERAS = ("keras_tensor", "input_layer")
"""How the names begin that Keras gives to inputs that have none."""

ROLES = {"inputs": "x", "targets": "y"}
"""Arguments of `fit`, by the role of what they hold."""


def input_names(model: Any) -> tuple[str, ...]:
    """Return the name of each `keras.Input` of a functional model, `""` where the user gave none; none for other models."""
    names = [str(getattr(tensor, "name", "")) for tensor in getattr(model, "inputs", None) or ()]
    return tuple("" if name.startswith(OF_KERAS) else name for name in names)


def named(path: str, names: tuple[str, ...]) -> str:
    """Return the path of an array of the inputs (`inputs/1`, `x`) with the name of its `keras.Input` in place of its number."""
    role, _, rest = path.partition("/")
    number = int(rest) if rest.isdecimal() else 0 if not rest and len(names) == 1 else len(names)
    return f"{role}/{names[number]}" if role in ("inputs", "x") and number < len(names) and names[number] else path


def shown(path: str) -> str:
    """Return the path of an array of the batch as `fit` names it: `x`, `x/age`, `y`."""
    role, slash, rest = path.partition("/")
    return ROLES.get(role, role) + slash + rest
