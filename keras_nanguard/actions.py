"""The actions of a policy, as frozen data: one class per action, and one table of all of them.

Nothing here touches a model. An action describes what to do; the guard does it and records an
outcome, done or skipped with a reason. Imports no backend.

Example:

    >>> from keras_nanguard import actions
    >>> actions.LowerLr(factor=0.5).factor
    0.5
"""

from __future__ import annotations

from keras_nanguard._policy import actions as _defined
from keras_nanguard._policy.actions import *  # noqa: F403  all of them are public

__all__ = [*_defined.__all__]
