"""Sends the incidents of a fit to its trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Incident
from keras_nanguard._keras import fitting as keras_fitting

MAX_TEXTS, MAX_ALERTS = 100, 10
"""Limits per fit: incidents written as text, and causes with an alert."""

REPORT = "nanguard/report.html"
"""Name of the artifact."""


class Trackers:
    """Sends the incidents of one fit.

    Args:
        callbacks: the callbacks of the fit.
        attempt: see `Reporter.attempt`.
    """

    def __init__(
        self, callbacks: Iterable[Any], attempt: Callable[[str, Callable[[], None]], None]
    ):
        self._callbacks, self._attempt = list(callbacks), attempt
        self._causes: Counter[str] = Counter()
        self._texts = 0

    def incident(self, incident: Incident) -> None:
        """Send one incident: as text to TensorBoard, and the first of each cause as an alert to
        Weights & Biases.
        """
        if processes.index() != 0:
            return
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        self._causes[cause] += 1
        if self._texts < MAX_TEXTS:
            self._texts += 1
            what = (self._callbacks, "nanguard/incident", str(incident), incident.step)
            self._attempt("send incidents to TensorBoard", lambda: keras_fitting.write_text(*what))
        if self._causes[cause] == 1 and len(self._causes) <= MAX_ALERTS:
            self._attempt(
                "send incidents to Weights & Biases", lambda: _alert(cause, str(incident))
            )

    def end(self, report: Callable[[], str]) -> None:
        """Set the tags of an MLflow run, and store the report as its artifact; `report` creates it.
        Without incidents only the tags.
        """
        if processes.index() == 0:
            self._attempt("send incidents to MLflow", lambda: _tagged(self._causes, report))


def _alert(cause: str, text: str) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.alert(title=f"NanGuard: {cause}", text=text)


def _tagged(causes: Counter[str], report: Callable[[], str]) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or not hasattr(mlflow, "active_run") or mlflow.active_run() is None:
        return
    tags = {"nanguard.incidents": sum(causes.values()), "nanguard.causes": ", ".join(causes)}
    mlflow.set_tags(tags)
    if causes:
        mlflow.log_text(report(), REPORT)
