"""Process functions of JAX: its processes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
from jax._src import distributed

from keras_nanguard._backends import interface
from keras_nanguard._core.errors import waiting_for

LIMIT = 300
"""Maximum seconds that one process waits for another: for a step, a validation, or a diagnosis."""

_NUMBERS = itertools.count()
"""The number of the next exchange, the same in all processes."""


class Host(interface.Host):
    """Functions for the process as a whole."""

    SPREADS_ARRAYS = True

    def place(self) -> tuple[int, int]:
        return jax.process_index(), jax.process_count()

    def trains_together(self, model: Any, loop: bool) -> bool:
        return self.place()[1] > 1

    def gathered(self, payload: bytes, what: str) -> list[bytes]:
        """Return the values of all processes, by rank.

        The messages use the coordination service that JAX starts for its processes, on the host. So
        they need no device and cannot be confused with arrays of a step.

        Raises:
            GuardError: if a process does not answer within `LIMIT` seconds, with its rank and the
                description.
        """
        rank, count = self.place()
        client, number = distributed.global_state.client, next(_NUMBERS)
        client.key_value_set_bytes(f"keras_nanguard/{number}/{rank}", payload)
        found = []
        for other in range(count):
            key = f"keras_nanguard/{number}/{other}"
            with waiting_for(what, count, partial("rank {}".format, other)):
                found.append(client.blocking_key_value_get_bytes(key, LIMIT * 1000))
        if number > 1:  # every process has read the message before the last one
            client.key_value_delete(f"keras_nanguard/{number - 2}/{rank}")
        return found
