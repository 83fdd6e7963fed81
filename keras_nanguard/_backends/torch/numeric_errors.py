"""Exceptions by which torch says that a number is bad: the step that raises one is a bad step, not the end of training.

Known by their words, as torch raises them as plain `RuntimeError` and `ValueError`: each entry names who raises it. Any
other exception is the user's and goes on to the user.
"""

from __future__ import annotations

__all__ = ["is_numeric"]

WORDS = (
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
)
"""Parts of the messages."""


def is_numeric(error: BaseException) -> bool:
    """Whether the exception is about a number that is not finite, or outside of what an operation accepts."""
    return isinstance(error, (RuntimeError, ValueError)) and any(words in str(error) for words in WORDS)
