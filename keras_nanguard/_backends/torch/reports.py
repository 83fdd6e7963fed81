"""Reports of refused steps to the host, as references: no argument of a step is copied before the
host reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.batches import as_tensors
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._core.verdict import Report, Verdict

__all__ = ["ReportQueue", "places"]


class ReportQueue:
    """Stores the reports of refused steps.

    Attributes:
        places: `(site, path)` of each row of counts in the running step.
    """

    def __init__(self) -> None:
        self.places: tuple[tuple[str, str], ...] = ()
        self._reports: list[Report] = []

    def put(
        self, verdict: Verdict, counts: Any, args: Sequence[Any], *, left_by_previous: bool = False
    ) -> None:
        """Store one report: the verdict of a step, its counts of bad entries, and its arguments."""
        self._reports.append(
            Report(
                verdict, self.places, counts, as_tensors(args), left_by_previous=left_by_previous
            )
        )

    def take(self) -> list[Report]:
        """Return and remove the reports."""
        reports, self._reports = self._reports, []
        return reports


def places(run: Any) -> list[tuple[str, str, Any]]:
    """Return `(site, path, tensor)` of everything that a report counts."""
    train_state, seen = run.train_state, run.seen
    paths = {**{key: v.path for key, v in run.undo_log.owner.items()}, **run.parts.paths}
    found = [("outputs", name, t) for name, t in seen.outputs]
    found += [("gradients", v.path, g) for record in seen.records for g, v in record.pairs]
    if run.error is not None and not seen.records:
        trained = [(v.path, getattr(v, "of", v.value).grad) for v in train_state.trainable]
        found += [("gradients", path, local(grad)) for path, grad in trained if grad is not None]
    found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in run.statistics]
    if seen.undo or not run.owner.refuse:
        for site, variables in (("weights", train_state.trainable), ("slots", train_state.slots)):
            found += [(site, v.path, v.value) for v in variables if reductions.can_be_bad(v.value)]
    return found
