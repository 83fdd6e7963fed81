"""The mutants that no test can tell from the code: each with the reason. `tests/campaigns/test_mutate.py` checks that their code exists."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXPLAINED", "Explained"]


@dataclass(frozen=True)
class Explained:
    """Mutants of one line that change nothing that can be seen.

    Attributes:
        module, function: where.
        before: the line.
        after: what stands there instead; empty for every mutant of the line that survives.
        why: why no test can see it.
    """

    module: str
    function: str
    before: str
    after: tuple[str, ...]
    why: str

    def covers(self, module: str, function: str, before: str, after: str) -> bool:
        """Return whether this is about a mutant."""
        return (self.module, self.function, self.before) == (module, function, before) and (not self.after or after in self.after)


EXPLAINED: tuple[Explained, ...] = ()
