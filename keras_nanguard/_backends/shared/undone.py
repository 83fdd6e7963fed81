"""Undoes everything that steps may write: common code of all backends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from keras_nanguard._backends import current
from keras_nanguard._backends.interface import Run
from keras_nanguard._keras import attributes as keras_attributes, variables as keras_variables
from keras_nanguard._keras.all_or_none import finish


@contextlib.contextmanager
def undone(run: Run) -> Iterator[None]:
    """Restore at the end, also after an exception, everything that steps may write, and drop their
    results: variables, learning rates, random generators, numbers and tensors in attributes of
    layers, gradients and schedulers of torch.

    Raises:
        StateLostError: if a variable could not be restored.
    """
    access = run.access
    access.sync_variables()
    state, called = run.read_train_state(), keras_attributes.called_by_step(run.model)
    untracked = access.transaction.learned.untracked.values()
    others = [*untracked, *keras_attributes.variables_of(called)]
    variables = keras_variables.unique([*state.written_by_calls, *others])
    restores = list(map(keras_variables.restorer, variables))

    def restore_variables() -> None:
        created = [partial(keras_variables.write, *pair) for pair in run.first_values()]
        finish([*restores, *created])

    side_effects = current.replay().restoring_side_effects(variables, run.model, state.optimizers)
    with contextlib.ExitStack() as ending:
        ending.callback(access.loop_state_restorer())
        ending.enter_context(keras_attributes.python_state_restored(called))
        ending.callback(restore_variables)
        ending.callback(access.sync_variables)
        ending.callback(lambda: access.transaction.drop_results())  # perhaps of a new trace
        ending.enter_context(side_effects)
        yield
