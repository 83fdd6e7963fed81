"""Reports of refused steps to the host."""

from __future__ import annotations

from keras_nanguard._core.verdict import Report

__all__ = ["ReportQueue"]


class ReportQueue:
    """Stores the reports of refused steps."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def put(self, report: Report) -> None:
        """Store a report."""
        self._reports.append(report)

    def take(self) -> list[Report]:
        """Return and remove the reports."""
        reports, self._reports = self._reports, []
        return reports
