"""The environment of the steps of a fit: `compile`, the train function, the data that `fit`
iterates over, printing.

Private Keras names used here, because there is no public API:

- ``keras.src.utils.io_utils.print_msg``: prints to the screen or to the log, as configured.
- ``Progbar._prev_total_width``: number of columns of a progress bar, 0 before it is drawn.
- ``Model._compile_config``: `compile` creates a new one, and nothing public reports that it was
  called.
- ``TensorBoard._writers``, ``TensorBoard._train_writer``: where it writes; a second writer would
  make a second run of it.
- ``OrbaxCheckpoint._save_checkpoint``: all of its saves go through it, and it reads the state
  itself.
- ``Model._make_function``: creates the train, test and predict functions; Keras before 3.8 or so
  has a method for each.
- ``Model._initial_epoch``: the epoch at which `fit` starts, as `BackupAndRestore` sets it.
- ``epoch_iterator``, a local variable of `fit`, `evaluate` and `predict`, its ``data_adapter``,
  ``x`` and ``y`` of `fit`, and the ``_distributed_dataset`` of TensorFlow's: callbacks get no
  reference to them.

`tests/keras_internals/test_internals.py` fails when a release of Keras removes one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keras
from keras.src.utils import io_utils

from keras_nanguard._core.display import is_terminal
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

# What `compile` was given, and the train function


def compiled_as(model: Any) -> Any:
    """Return an object that identifies the last call of `compile`, `None` if it was never
    called.
    """
    return getattr(model, "_compile_config", None)


def trains_by_compiled_loss(model: Any) -> bool:
    """Whether a model is trained by Keras' own train step on the loss that `compile` was given."""
    own = type(model)
    return (
        isinstance(model, keras.Model)
        and not _overridden(own, "train_step")
        and not _overridden(own, "compute_loss")
        and getattr(model, "_compile_loss", None) is not None
    )


def _overridden(own: type, name: str) -> bool:
    """Whether a custom class, not of Keras or this library, defines a method."""
    definer = next(base for base in own.__mro__ if name in vars(base))
    return definer.__module__.partition(".")[0] not in ("keras", "keras_nanguard")


def built_in(model: Any, train_state: TrainState) -> tuple[Any, ...]:
    """Return the objects that a trace of a train step captures: the call of `compile`, the
    optimizers, their rates, all variables.

    The `trainable` flags are not part of it: Keras keeps its train function until `compile` is
    called.
    """
    optimizers = train_state.optimizers
    rates = [keras_optimizers.given_rate(keras_optimizers.inner(o)) for o in optimizers]
    variables = sorted(train_state.everything, key=id)
    return (compiled_as(model) or object(), *optimizers, *rates, *variables)


@contextmanager
def as_built(model: Any, optimizers: Iterable[Any]) -> Iterator[None]:
    """Set `trainable` of the variables to the values for which the optimizers were built.

    Keras keeps its train function if `trainable` is changed without a call of `compile`.
    """
    built = [v for o in optimizers if o.built for v in keras_optimizers.trained_by(o)]
    trained = {id(keras_variables.unwrapped(v)) for v in built}
    changed = [v for v in model.variables if trained and v.trainable != (id(v) in trained)]
    for variable in changed:
        variable.trainable = not variable.trainable
    try:
        yield
    finally:
        for variable in changed:
            variable.trainable = not variable.trainable


def on_making(
    model: Any,
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
    overrides: Overrides,
    default: Callable[..., Any] | None = None,
) -> bool:
    """Override the method that creates the train, test and predict functions of a model, or a
    default; return whether there is one.
    """
    real = getattr(model, "_make_function", default)
    if real is not None:
        overrides.set(model, "_make_function", change(real))
    return real is not None


# The epoch at which `fit` starts


def begin_at(model: Any, epoch: int | None) -> None:
    """Make `fit` start at this epoch, as `BackupAndRestore` does; `None` undoes it.

    It overrides the argument `initial_epoch` of `fit`.
    """
    if epoch is not None:
        model._initial_epoch = _Epoch(epoch)
    elif isinstance(getattr(model, "_initial_epoch", None), _Epoch):
        model._initial_epoch = None


def restored_epoch(model: Any) -> int | None:
    """Return the epoch at which another callback makes `fit` start, `None` if none does."""
    epoch = getattr(model, "_initial_epoch", None)
    return None if epoch is None or isinstance(epoch, _Epoch) else int(epoch)


class _Epoch(int):
    """An epoch that is true even if it is 0: `fit` starts at `model._initial_epoch or
    initial_epoch`.
    """

    def __bool__(self) -> bool:
        return True


# The data of the running call. Callbacks get no reference to them


def running_data() -> Any:
    """Return the data adapter of the innermost running `evaluate` or `predict`, `None` if it can be
    read only once.
    """
    epochs = _locals_of("evaluate", "predict").get("epoch_iterator")
    adapter = getattr(epochs, "data_adapter", None)
    return None if "Generator" in type(adapter).__name__ else adapter


def running_spec() -> Any:
    """Return the `element_spec` of the `tf.data.Dataset` that the innermost `fit` trains on, `None`
    if there is none.
    """
    dataset = getattr(_locals_of("fit").get("epoch_iterator"), "_distributed_dataset", None)
    return getattr(dataset, "element_spec", None)


def running_arrays() -> tuple[Any, Any]:
    """Return `x` and `y` of the innermost running `fit` if it trains on arrays, else `(None,
    None)`.

    The rows at the end that `validation_split` removes are not included.
    """
    given = _locals_of("fit")
    adapter = getattr(given.get("epoch_iterator"), "data_adapter", None)
    on_arrays = type(adapter).__name__ == "ArrayDataAdapter"
    return (given.get("x"), given.get("y")) if on_arrays else (None, None)


def _locals_of(*calls: str) -> Mapping[str, Any]:
    """Return the local variables of the innermost running call of these functions of Keras that
    iterates over data; none if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in calls and "epoch_iterator" in frame.f_locals:
            return frame.f_locals
        frame = frame.f_back
    return {}


# Printing, and other callbacks


def print_message(text: str) -> None:
    """Print lines like Keras: to the screen, or to the log.

    A progress bar in the current line is cleared first, and its next update draws it again below.
    In a file it cannot be cleared and stays above.
    """
    on_screen = keras.config.is_interactive_logging_enabled()
    if sys.stdout is None and on_screen:  # a program without a console
        return
    bar = _bar_in_line()
    if bar is not None and on_screen:
        width, bar._prev_total_width = bar._prev_total_width, 0
        clearable = "ipykernel" in sys.modules or is_terminal()
        text = (f"\r{' ' * width}\r" if clearable else "\n") + text
    io_utils.print_msg(text)


def _bar_in_line() -> Any:
    """Return the `Progbar` of the innermost running `fit`, `evaluate` or `predict` that has drawn
    something, `None` if none has.
    """
    callbacks = getattr(_locals_of("fit", "evaluate", "predict").get("callbacks"), "callbacks", ())
    bars = [c.progbar for c in callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]
    drawn = (bar for bar in bars if bar and bar.verbose == 1 and bar._prev_total_width)
    return next(drawn, None)


def savers(callbacks: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return `(callback, method)` of callbacks that save a model without `Model.save` and
    `Model.save_weights`.
    """
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    found = [c for c in callbacks if orbax is not None and isinstance(c, orbax)]
    return [(callback, "_save_checkpoint") for callback in found]


def write_text(callbacks: Iterable[Any], name: str, text: str, step: int) -> None:
    """Write a text to the event files of each `TensorBoard` among the callbacks."""
    for callback in callbacks:
        is_board = isinstance(callback, keras.callbacks.TensorBoard)
        if is_board and getattr(callback, "_writers", None) is not None:
            with callback._train_writer.as_default():
                callback.summary.text(name, text, step=step)
