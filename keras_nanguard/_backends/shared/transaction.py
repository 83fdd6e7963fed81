"""What the transactions of all backends have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from keras_nanguard._backends import interface


class Transaction(interface.Transaction):
    """A transaction that exists. A backend implements how its step runs."""

    def keys_of(self, variable: Any) -> Iterable[int]:
        """Return the keys of a variable in `learned`."""
        return (id(variable),)

    def tolerate(self, variables: Sequence[Any]) -> None:
        keys = {key for variable in variables for key in self.keys_of(variable)}
        self.learned = replace(self.learned, tolerated=self.learned.tolerated | keys)

    def inherit(self, other: interface.Transaction) -> None:
        """Start with what another transaction for the same body has learned."""
        self.learned = other.learned

    def rebind(self, run: interface.Run) -> None:
        """Use the transaction for another run on the same model, where a backend keeps it."""
        self.run, self.reused = run, True
        self.resume()

    def release_run(self) -> None:
        """Release everything that belongs to the finished run."""
        raise NotImplementedError
