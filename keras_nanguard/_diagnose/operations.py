"""How an operation produced NaN or Inf, from its name and the magnitudes of its operands."""

from __future__ import annotations

from keras_nanguard._core.evidence import Origin

LOW = ("float16", "bfloat16")
"""Dtypes of low precision."""

EXPONENTIALS = frozenset({"Exp", "Expm1", "Sinh", "Cosh", "Softplus", "Pow"})
"""Operations that overflow for moderate operands."""

DIVISIONS = ("RealDiv", "Div", "Xdivy")
"""Operations that have a pole if their second operand is 0."""

POLES = frozenset(
    (
        *("RealDiv", "Div", "TruncateDiv", "FloorDiv", "FloorMod", "Xdivy", "Reciprocal", "Inv"),
        *("Sqrt", "Rsqrt", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"),
        *("Log", "Log1p", "Xlogy", "Xlog1py", "Lgamma", "Digamma", "Polygamma", "Zeta"),
        *("Betainc", "Igamma", "Softmax", "LogSoftmax"),
        *("Acos", "Asin", "Acosh", "Atanh", "Atan2", "Sin", "Cos", "Tan", "Erfinv", "Ndtri"),
        *("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant"),
        *("MatrixSolve", "Svd", "Qr"),
    )
)
"""Operations with points at which their value is not finite."""

MAX_BASE = 50.0
"""Base of a power above which it overflows because of its exponent."""


def kind(origin: Origin) -> str:
    """Return how the value became non-finite: `"overflow"` of large numbers, `"exp"` of moderate
    ones, `"pole"`; `""` if no operation produced it.
    """
    if origin.source != "operation":
        return ""
    op, operands = origin.op, origin.operands
    large = max((o.max_abs for o in operands), default=0.0) >= _large(origin.dtype)
    if op in DIVISIONS and len(operands) > 1:
        return "overflow" if large and not (operands[1].zero or operands[1].tiny) else "pole"
    if op == "Pow":
        if large:  # a square, which PyTorch reports as Pow
            return "overflow"
        return "exp" if operands and operands[0].max_abs > MAX_BASE else "pole"
    if op in EXPONENTIALS:
        return "exp"
    if op in POLES or any(o.infinite for o in operands):
        return "pole"
    return "overflow" if large or origin.dtype in LOW else "pole"


def _large(dtype: str) -> float:
    return 1e3 if dtype == "float16" else 1e15
