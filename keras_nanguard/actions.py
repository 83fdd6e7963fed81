"""The actions of a policy, as frozen data: one class per action, and one table of all of them.

Nothing here touches a model. An action describes what to do; the guard does it and records an outcome, done or skipped
with a reason. Imports no backend.

Example:

    >>> from keras_nanguard import actions
    >>> actions.LowerLr(factor=0.5).to_dict()["factor"]
    0.5
    >>> actions.from_file({"lower_lr": {"factor": 0.5}}) == actions.LowerLr(factor=0.5)
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_nanguard._policy import actions as _defined
from keras_nanguard._policy.actions import *  # noqa: F403  all of them are public

if TYPE_CHECKING:
    from keras_nanguard._policy.schema import action_from_dict as from_dict, action_from_file as from_file

__all__ = [*_defined.__all__, "from_dict", "from_file"]


if not TYPE_CHECKING:  # a tool that saw it would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Return what needs pydantic, on first use."""
        from keras_nanguard._policy import schema

        if name not in ("from_dict", "from_file"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(schema, f"action_{name}")
        return value
