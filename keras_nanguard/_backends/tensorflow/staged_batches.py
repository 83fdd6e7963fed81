"""The batches of TensorFlow steps that take them inside of the graph: those of the last executions of several steps.

Where the host takes a batch off the data it has it, and nothing of this is needed. Handing a batch out of a compiled step,
beside its result, costs a tenth of a step of 0.65 ms; a list in a variable costs 0.03 of it. What is done here costs less than
can be distinguished from noise.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.shared import batch_memory

__all__ = ["Execution", "Layouts", "Stored"]

BYTES = 2
"""Place of the size of a batch in the head of its tuple, after the numbers of its layout and of its step."""

NONE = -1
"""Number of the layout of what is no batch."""

MIN_BATCHES = 8
"""Batches that are kept of an execution, whatever they take, so that a refused one is there to be looked at."""

_numbers = itertools.count()


class Execution:
    """The batches of one execution of several steps that the host took off the data.

    Args:
        batches: the arguments of each step.
        last: number of the last step.
    """

    def __init__(self, batches: Sequence[Any], last: int):
        self.batches, self.last = batches, last

    def batch(self, step: int) -> Any:
        """Return the arguments of this step, `None` where it is not one of them."""
        place = len(self.batches) - 1 - (self.last - step)
        return self.batches[place] if 0 <= place < len(self.batches) else None

    def part(self, step: int) -> Any:
        """Return what is remembered of this step: what it was given, and not what the others were."""
        return self.batch(step)


class Layouts:
    """The structures that batches have been seen in, by number."""

    def __init__(self) -> None:
        self._specs: list[Any] = []

    def flat(self, args: Any) -> tuple[int, list[Any]]:
        """Return the number of the structure of a batch, and its component tensors."""
        leaves = [tf.convert_to_tensor(t) for t in tf.nest.flatten(args, expand_composites=True) if t is not None]
        self._specs.append(tf.nest.map_structure(_spec, args))
        return len(self._specs) - 1, leaves

    def packed(self, number: int, leaves: Sequence[Any]) -> Any:
        """Put component tensors back into the structure of this number."""
        return _packed(self._specs[number], leaves)


class Stored:
    """The batches of the last steps, kept on the host's side of the graph until the host asks.

    A staging area of TensorFlow's holds tuples of tensors, first in, first out. It is filled with empty ones when the step
    is traced; each step puts its batch in and takes the oldest one out, so that two small operations on references
    are all that it pays. The batch goes in first: an execution that is cut short can only make the area longer. Both wait
    for an area that is empty, so the host asks how much is in it before it takes or reads anything, and nobody else takes.
    """

    def __init__(self) -> None:
        self._layouts = Layouts()
        self._areas: dict[tuple[Any, ...], _Area] = {}

    def put(self, args: Any, step: Any) -> None:
        """Keep the batch of the step of this number."""
        number, leaves = self._layouts.flat(args)
        with tf.device("CPU:0"):
            head = tf.stack([tf.constant(number, tf.int64), tf.cast(step, tf.int64), _bytes(leaves)])
            dtypes = (head.dtype, *(leaf.dtype for leaf in leaves))
            if dtypes not in self._areas:
                self._areas[dtypes] = _Area(dtypes)
            self._areas[dtypes].exchange([head, *leaves])

    def batch(self, step: int) -> Any:
        """Return the batch of the step of this number, `None` where it is not kept any more."""
        for area in self._areas.values():
            for back in range(area.size()):
                (number, own, _), *leaves = area.peek(back)
                if number != NONE and own == step:
                    return self._layouts.packed(int(number), leaves)
        return None

    def shrink(self, steps: int) -> None:
        """Release the oldest ones where all of them take more bytes than they may.

        Args:
            steps: steps of one execution.
        """
        for area in self._areas.values():
            area.shrink(batch_memory.MAX_BYTES, min(steps, MIN_BATCHES))

    def fill(self) -> None:
        """Begin anew after `clear`."""
        for area in self._areas.values():
            area.fill()

    def clear(self) -> None:
        """Release everything. An execution after that takes out what it has put in."""
        for area in self._areas.values():
            area.clear()


class _Area:
    """A staging area that always holds as many tuples; one that starts with `NONE` is no batch.

    Attributes:
        bytes: what the batches in it take, counted by the steps.
    """

    def __init__(self, dtypes: Sequence[Any]):
        self.dtypes, self.name = list(dtypes), f"nanguard_batches_{next(_numbers)}"
        with tf.init_scope(), tf.device("CPU:0"):
            self.bytes = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.fill()
        weakref.finalize(self, _clear, self.name, self.dtypes).atexit = False

    def fill(self) -> None:
        """Put in as many tuples as it holds, each of which is no batch."""
        with tf.init_scope(), tf.device("CPU:0"):
            empty = [tf.constant([NONE, NONE, 0], tf.int64), *(tf.zeros([0], dtype) for dtype in self.dtypes[1:])]
            for _ in range(batch_memory.MAX_BATCHES):
                tf.raw_ops.Stage(values=empty, shared_name=self.name)
            self.bytes.assign(0)

    def exchange(self, items: Sequence[Any]) -> None:
        """Put a tuple in, and take the oldest one out."""
        with tf.control_dependencies([tf.raw_ops.Stage(values=items, shared_name=self.name)]):
            oldest, *_ = tf.raw_ops.Unstage(dtypes=self.dtypes, shared_name=self.name)
        self.bytes.assign_add(items[0][BYTES] - oldest[BYTES])

    def size(self) -> int:
        """Return how many tuples there are."""
        with tf.device("CPU:0"):
            return int(tf.raw_ops.StageSize(dtypes=self.dtypes, shared_name=self.name))

    def peek(self, back: int) -> tuple[Any, ...]:
        """Return the tuple so many before the last one, its head as numbers; `NONE` where there is none."""
        place = self.size() - 1 - back
        if not 0 <= back <= place + back:
            return (NONE, NONE, 0), *((),) * (len(self.dtypes) - 1)
        with tf.device("CPU:0"):
            head, *leaves = tf.raw_ops.StagePeek(index=place, dtypes=self.dtypes, shared_name=self.name)
        return tuple(head.numpy().tolist()), *leaves

    def shrink(self, most: int, fewest: int) -> None:
        """Take out the oldest until the others take no more than so many bytes, or are as few as this; hold as many from now on."""
        held = int(self.bytes)
        if held <= most:
            return
        with tf.device("CPU:0"):
            for _ in range(self.size() - fewest):
                head, *_ = tf.raw_ops.Unstage(dtypes=self.dtypes, shared_name=self.name)
                held -= int(head[BYTES])
                if held <= most:
                    break
        self.bytes.assign(held)

    def clear(self) -> None:
        """Release what it holds."""
        _clear(self.name, self.dtypes)
        with tf.init_scope():
            self.bytes.assign(0)


def _bytes(leaves: Sequence[Any]) -> Any:
    """Return how many bytes tensors of a graph take."""
    sizes = [tf.size(leaf, tf.int64) * (leaf.dtype.size or 16) for leaf in leaves]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)


def _clear(name: str, dtypes: Sequence[Any]) -> None:
    """Release what an area holds; TensorFlow keeps the area itself, by its name, until the process ends."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.raw_ops.StageClear(dtypes=list(dtypes), shared_name=name)


class _Leaf:
    """Stands for one component tensor in a remembered structure."""


def _spec(value: Any) -> Any:
    if value is None:
        return None
    return tf.type_spec_from_value(value) if isinstance(value, tf.__internal__.CompositeTensor) else _Leaf()


def _packed(specs: Any, leaves: Sequence[Any]) -> Any:
    """Put component tensors back into the structure they came from."""
    rest = iter(leaves)

    def fill(spec: Any) -> Any:
        if spec is None:
            return None
        if isinstance(spec, _Leaf):
            return next(rest)
        parts = tf.nest.flatten(spec, expand_composites=True)
        return tf.nest.pack_sequence_as(spec, [next(rest) for _ in parts], expand_composites=True)

    return tf.nest.map_structure(fill, specs)
