"""Exceptions by which torch reports a bad number: a step that raises one is a bad step.

Torch raises them as plain `RuntimeError` and `ValueError`, so type and message alone do not
distinguish them from an exception of the user's code. `is_numeric` also checks the origin: the code
that raised it is torch's own Python, or no Python at all (the C++ of torch). An exception that a
`raise` statement outside of torch has raised is never taken for one.
"""

from __future__ import annotations

import dis
import os

import torch

MESSAGES = (
    "all elements of input should be between 0 and 1",  # binary_cross_entropy of NaN, on the CPU
    "all elements of target should be between 0 and 1",
    "probability tensor contains either `inf`, `nan` or element < 0",  # multinomial
    "invalid multinomial distribution (sum of probabilities <= 0)",
    "Expected p_in >= 0 && p_in <= 1",  # bernoulli
    "normal expects all elements of std >= 0.0",
    "to satisfy the constraint",  # torch.distributions, of its arguments
    "returned nan values in its",  # autograd in anomaly mode
    "because the input matrix contained non-finite values",  # torch.linalg
    "input contains non-finite values",
    "input tensor should not contain infs or NaNs",  # torch.linalg.eig
    "is non-finite, so it cannot be clipped",  # clip_grad_norm_ with error_if_nonfinite=True
)
"""Parts of the messages; each comment names the function that raises it."""

PACKAGE = os.path.dirname(torch.__file__) + os.sep
"""Folder of torch's Python code."""

RAISE = dis.opmap["RAISE_VARARGS"]
"""The instruction of a `raise` statement."""


def is_numeric(error: BaseException) -> bool:
    """Return whether torch has raised this because of a value that an operation does not accept."""
    if not isinstance(error, (RuntimeError, ValueError)):
        return False
    traceback = error.__traceback__
    if traceback is None or not any(message in str(error) for message in MESSAGES):
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    in_torch = os.path.abspath(code.co_filename).startswith(PACKAGE)
    return in_torch or code.co_code[traceback.tb_lasti] != RAISE
