"""Programs that fail numerically, each by one mechanism, and the same programs without the fault.

`PROGRAMS` maps a name to a function `build(bad) -> Case`. The healthy twin is `build(False)`.
"""

from mechanisms import batch, compiled, forward, growth, losses, more_layers, precision, slopes  # noqa: F401  they register
from mechanisms.case import MARKS, PROGRAMS, Case

__all__ = ["MARKS", "PROGRAMS", "Case"]
