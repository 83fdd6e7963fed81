"""What the report of a bad step on PyTorch is about: every tensor that the step was judged by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.parts import Parts
from keras_nanguard._backends.torch.undo_log import UndoLog


def places(
    seen: Intercept,
    parts: Parts,
    log: UndoLog,
    statistics: Iterable[Any],
    updated: bool,
    raised: bool,
) -> list[tuple[str, str, Any]]:
    """Return `(site, path, tensor)` of everything that the report of a step counts.

    Args:
        seen: the calls of optimizers and loss.
        parts: the train state.
        log: the undo log, which has the variables of written tensors.
        statistics: the written statistics that are judged.
        updated: whether an update has run.
        raised: whether the step has ended in an exception, which leaves its gradients behind if it
            came before the first update.
    """
    state = parts.train_state
    paths = {**{key: v.path for key, v in log.writers.items()}, **parts.paths}
    found = [("outputs", name, t) for name, t in seen.outputs]
    found += [("gradients", v.path, g) for record in seen.records for g, v in record.pairs]
    if raised and not seen.records:
        found += [("gradients", path, gradient) for path, gradient in parts.gradients()]
    found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in statistics]
    if updated:
        for site, variables in (("weights", state.trainable), ("slots", state.slots)):
            bad = (v for v in variables if reductions.can_be_bad(v.value))
            found += [(site, v.path, v.value) for v in bad]
    return found
