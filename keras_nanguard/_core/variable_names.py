"""Names that Keras gives to the variables of layers, and what follows from a name alone: which
variables are statistics, which cannot be negative, and which start at 1. Imports nothing.
"""

from __future__ import annotations

MOVING = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
"""The statistics of a BatchNormalization; the last three only if it renormalizes."""

STATISTIC = ("mean", "variance", "stddev")
"""Words in the name of a running statistic, also of a custom layer."""

SPREADS = ("variance", "stddev")
"""Words in the name of a statistic that cannot be negative."""

ONES = ("moving_variance", "moving_stddev", "renorm_stddev", "variance", "gamma")
"""Variables that start at 1 if nothing else is configured."""
