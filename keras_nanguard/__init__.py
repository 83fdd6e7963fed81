"""Numeric guarding for Keras 3 training.

    model.fit(x, y, callbacks=[NanGuard()])

Names are imported on first use, so that the command line and the reading of files need no backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keras_nanguard._version import __version__ as __version__

if TYPE_CHECKING:
    from keras_nanguard._core.errors import (
        BundleError as BundleError,
        FileFormatError as FileFormatError,
        GuardError as GuardError,
        GuardInUseError as GuardInUseError,
        NanGuardError as NanGuardError,
        PolicyError as PolicyError,
        StateLostError as StateLostError,
    )
    from keras_nanguard._core.incident import (
        Decision as Decision,
        Diagnosis as Diagnosis,
        Finding as Finding,
        Incident as Incident,
        NonFiniteError as NonFiniteError,
        Outcome as Outcome,
    )
    from keras_nanguard._diagnose.diagnose import diagnose as diagnose
    from keras_nanguard._diagnose.replay import replay as replay
    from keras_nanguard._files.recalibrate import recalibrate as recalibrate
    from keras_nanguard._files.repair import repair as repair
    from keras_nanguard._files.scan import scan as scan
    from keras_nanguard._lint import lint as lint
    from keras_nanguard._policy.policy import Policy as Policy
    from keras_nanguard._recording.recording import Recording as Recording
    from keras_nanguard.guard import NanGuard as NanGuard
    from keras_nanguard.model import NanGuardModel as NanGuardModel

_HOMES = {
    "NanGuard": "guard",
    "NanGuardModel": "model",
    "Policy": "_policy.policy",
    **dict.fromkeys(("Incident", "Finding", "Diagnosis", "Decision", "Outcome"), "_core.incident"),
    **dict.fromkeys(("BundleError", "FileFormatError", "GuardError", "GuardInUseError"), "errors"),
    **dict.fromkeys(("NanGuardError", "NonFiniteError", "PolicyError", "StateLostError"), "errors"),
    "Recording": "_recording.recording",
    "diagnose": "_diagnose.diagnose",
    "lint": "_lint",
    "recalibrate": "_files.recalibrate",
    "repair": "_files.repair",
    "replay": "_diagnose.replay",
    "scan": "_files.scan",
}
"""The module of each name."""

if not TYPE_CHECKING:  # a tool that saw it would take any name for a public one
    __all__ = sorted([*_HOMES, "__version__"])

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            from keras_nanguard._core.errors import no_backend

            if text := no_backend(error):
                raise ModuleNotFoundError(text, name=error.name) from error
            raise
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
