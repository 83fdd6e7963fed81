"""Numbers of steps."""

from __future__ import annotations

from typing import NamedTuple

from keras_nanguard._core.plain_values import times


class Totals(NamedTuple):
    """Numbers of steps of one or several fits.

    Attributes:
        steps: complete train steps, including refused ones; `None` if unknown.
        overflows: those of them that were ordinary float16 overflows, which are not incidents.
        run_again: further steps that were refused, undone by a rollback or a restart, and run
            again.
    """

    steps: int | None = 0
    refused: int = 0
    overflows: int = 0
    run_again: int = 0

    @property
    def replayed(self) -> str:
        """The further steps in words, after a comma; `""` without any."""
        again = times(self.run_again, "skipped step")
        return f", {again} undone and run again" if self.run_again else ""
