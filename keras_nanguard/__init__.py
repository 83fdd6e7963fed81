"""Numeric guarding for Keras 3 training.

    model.fit(x, y, callbacks=[NanGuard()])

Names are imported on first use, so that the command line and the reading of files need no backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keras_nanguard._version import __version__

if TYPE_CHECKING:
    from keras_nanguard._diagnose.examine import diagnose as diagnose
    from keras_nanguard._diagnose.replay import replay as replay
    from keras_nanguard._errors import BundleError as BundleError
    from keras_nanguard._errors import FileFormatError as FileFormatError
    from keras_nanguard._errors import GuardError as GuardError
    from keras_nanguard._errors import GuardInUseError as GuardInUseError
    from keras_nanguard._errors import NanGuardError as NanGuardError
    from keras_nanguard._errors import NonFiniteError as NonFiniteError
    from keras_nanguard._errors import PolicyError as PolicyError
    from keras_nanguard._files._reestimate import recalibrate as recalibrate
    from keras_nanguard._files._repair import repair as repair
    from keras_nanguard._files._scan import scan as scan
    from keras_nanguard._guard import NanGuard as NanGuard
    from keras_nanguard._incident import Decision as Decision
    from keras_nanguard._incident import Diagnosis as Diagnosis
    from keras_nanguard._incident import Finding as Finding
    from keras_nanguard._incident import Incident as Incident
    from keras_nanguard._incident import Outcome as Outcome
    from keras_nanguard._lint import lint as lint
    from keras_nanguard._model import NanGuardModel as NanGuardModel
    from keras_nanguard._policy._policy import Policy as Policy

_HOMES = {
    "NanGuard": "_guard",
    "NanGuardModel": "_model",
    "Policy": "_policy._policy",
    "Incident": "_incident",
    "Finding": "_incident",
    "Diagnosis": "_incident",
    "Decision": "_incident",
    "Outcome": "_incident",
    **dict.fromkeys(
        ("BundleError", "FileFormatError", "GuardError", "GuardInUseError", "NanGuardError", "NonFiniteError", "PolicyError"), "_errors"
    ),
    "diagnose": "_diagnose.examine",
    "lint": "_lint",
    "recalibrate": "_files._reestimate",
    "repair": "_files._repair",
    "replay": "_diagnose.replay",
    "scan": "_files._scan",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
