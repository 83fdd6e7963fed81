"""The report of a bad step on PyTorch: how many entries are bad in each tensor that was checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.arguments import as_tensors
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._backends.torch.parts import Parts
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Report, Verdict

__all__ = ["places", "report"]

Place = tuple[str, str, Any]
"""`(site, path, tensor)` of a tensor that a report counts."""


def report(
    verdict: Verdict, places: Sequence[Place], args: Sequence[Any], left_by_previous: bool
) -> Report:
    """Return the report of a step with the counts of these places. No argument is copied."""
    return Report(
        verdict,
        tuple((site, path) for site, path, _ in places),
        reductions.counts([tensor for _, _, tensor in places]),
        as_tensors(args),
        left_by_previous=left_by_previous,
    )


def places(
    seen: Intercept,
    parts: Parts,
    log: UndoLog,
    statistics: Iterable[Any],
    updated: bool,
    raised: bool,
) -> list[Place]:
    """Return everything that the report of a step counts.

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
        grads = [(v.path, getattr(v, "of", v.value).grad) for v in state.trainable]
        found += [("gradients", path, local(grad)) for path, grad in grads if grad is not None]
    found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in statistics]
    if updated:
        for site, variables in (("weights", state.trainable), ("slots", state.slots)):
            bad = (v for v in variables if reductions.can_be_bad(v.value))
            found += [(site, v.path, v.value) for v in bad]
    return found
