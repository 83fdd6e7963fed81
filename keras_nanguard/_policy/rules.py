"""Rules: actions for some incidents instead of those of the policy."""

from __future__ import annotations

from pydantic import Field

from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._policy.actions import Items
from keras_nanguard._policy.records import Causes, Globs, Kinds, Name, Record, Sites
from keras_nanguard._policy.settings import matches_path

__all__ = ["Rule"]


class Rule(Record):
    """Actions for incidents with a given cause, site, kind or layer.

    A rule that only reports (`warn`, `quarantine`, `call`) adds its actions to the decision. Any
    other rule replaces the decision.
    """

    name: Name = Field(description="a rule replaces the rule of the preset that has the same name")
    cause: Causes = Field(default=(), description="causes that it applies to, all if omitted")
    site: Sites = Field(default=(), description="sites that it applies to, all if omitted")
    kind: Kinds = Field(default=(), description="kinds that it applies to, all if omitted")
    layer: Globs = Field(default=(), description="globs of Keras paths, all if omitted")
    after: int = Field(
        default=1, ge=1, le=10**6, description="number of such incidents in a row at which it acts"
    )
    do: Items = Field(description="one action or several")

    @property
    def only_reports(self) -> bool:
        """Whether no action changes the run, ends it or is `skip`."""
        return not any(
            action.changes or action.terminal or action.name == "skip" for action in self.do
        )

    def matches(self, incident: Incident) -> bool:
        """Return whether the rule applies to an incident: one of its findings meets every field."""
        if self.cause and incident.causes.isdisjoint(self.cause):
            return False
        return any(self._finding(finding) for finding in incident.findings)

    def _finding(self, finding: Finding) -> bool:
        return (
            (not self.site or finding.site in self.site)
            and (not self.kind or finding.kind in self.kind)
            and (not self.layer or any(matches_path(finding.path, glob) for glob in self.layer))
        )
