"""What the steps of a body have shown about one thing that it may do."""

from __future__ import annotations

from enum import Enum


class Seen(Enum):
    """Whether the steps of a body so far have done something."""

    UNKNOWN = "unknown"
    NO = "no"
    YES = "yes"

    @classmethod
    def of(cls, done: bool) -> Seen:
        """Return what one step shows that has done it, or has not."""
        return cls.YES if done else cls.NO

    @property
    def is_possible(self) -> bool:
        """Whether the next step may do it, as far as is known."""
        return self is not Seen.NO

    def then(self, later: Seen) -> Seen:
        """Return what all steps show, with a later one: `YES` if any of them has done it."""
        return later if later is Seen.YES or self is Seen.UNKNOWN else self

    def of_another_body(self) -> Seen:
        """Return what is assumed of another body: what this one has not done, that one may do."""
        return self if self is Seen.YES else Seen.UNKNOWN
