"""Where NaN and Inf come from, as plain values: the operation that produced the first one in a
replay, and the arrays of the batch."""

from __future__ import annotations

from dataclasses import dataclass

COMPILE_LOSS = "compile_loss"
"""Name of the frame in which Keras sums the losses given to `compile`."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One float input of an operation.

    Attributes:
        max_abs: its largest finite magnitude, 0.0 if no entry is finite.
        zero: whether it contains a zero.
        negative: whether it contains a finite negative number.
        tiny: whether it contains numbers so small that division by them overflows.
        holds: which of NaN, Inf and -Inf it contains, in words; `""` if none.
        whole: whether every entry is NaN or Inf.
    """

    max_abs: float
    zero: bool
    negative: bool
    tiny: bool = False
    holds: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation that produced the first NaN or Inf that reached a bad result.

    Attributes:
        order: index of the operation within the step.
        source: `"operation"`; `"batch"`, `"variable"` or `"constant"` if the value existed before
            the step.
        op: type of the operation as the backend names it (`"Exp"`), or the name of the source.
        phase: `"forward"`, `"loss"`, `"regularizer"`, `"backward"`, `"update"` or `"other"`;
            `"slope"` if forward and backward pass cannot be distinguished.
        frames: what was running, outermost first: paths of layers, names of losses.
        culprit: path of the layer or name of the loss to blame, `""` if none was running.
        layer_class: class of that layer or loss.
        nan: NaN entries of its result.
        inf: infinite entries of its result.
        size: number of entries of its result.
        operands: its float inputs.
        dtype: dtype of its result.
        rows: rows of the batch with a bad entry; empty if the result has no rows or every row is
            bad.
        all_rows: whether every row is bad.
        variables: paths of the variables that it reads directly.
        line: source line in the user's code, `""` if there is none.
    """

    order: int
    source: str
    op: str
    phase: str
    frames: tuple[str, ...] = ()
    culprit: str = ""
    layer_class: str = ""
    nan: int = 0
    inf: int = 0
    size: int = 0
    operands: tuple[Operand, ...] = ()
    dtype: str = ""
    rows: tuple[int, ...] = ()
    all_rows: bool = False
    variables: tuple[str, ...] = ()
    line: str = ""


BACKWARD = ("backward", "slope")
"""Phases of an `Origin` in which a gradient is computed."""


NOWHERE = Origin(order=1 << 60, source="", op="", phase="")
"""The origin if no operation and no value is known to be it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Magnitudes of one array of the batch, its finite entries only.

    Attributes:
        name: path within the batch.
        constant: number of features with the same value in all rows.
        outliers: rows whose largest magnitude is far above that of the others.
        integer: whether its entries are integers that may be ids, and not numbers.
    """

    name: str
    max_abs: float
    mean: float
    std: float
    constant: int = 0
    outliers: tuple[int, ...] = ()
    integer: bool = False


@dataclass(frozen=True, slots=True)
class BadArray:
    """An array of the batch that holds NaN or Inf.

    Attributes:
        name: path within the batch.
        rows: the rows that hold them, empty if unknown.
        nan: number of NaN.
        inf: number of Inf and -Inf.
        column: the only column of a matrix in which several rows have them, `None` if there are
            several.
    """

    name: str
    rows: tuple[int, ...]
    nan: int
    inf: int
    column: int | None = None
