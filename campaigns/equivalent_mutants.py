"""The mutants that no test can distinguish from the code, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXPLAINED", "Explained"]


@dataclass(frozen=True)
class Explained:
    """Mutants of one line without an observable change.

    Attributes:
        module, function: the place.
        before: the line.
        after: the line of the mutant; empty for all surviving mutants of the line.
        why: the reason why no test can detect it.
    """

    module: str
    function: str
    before: str
    after: tuple[str, ...]
    why: str

    def covers(self, module: str, function: str, before: str, after: str) -> bool:
        """Return whether this is about a mutant."""
        return (self.module, self.function, self.before) == (module, function, before) and (not self.after or after in self.after)


SPEED = "Both ways give the same answer; one of them is faster."
ABSORBED = "NaN and Inf survive a subtraction as they do an addition, and Python's floats add up five numbers of float32 without overflow."
UNREAD = "It replaces the counts of a step that commits, which are never read."

EXPLAINED: tuple[Explained, ...] = (
    Explained(
        "_core/verdict.py",
        "",
        "PERIOD = 1 << 23",
        (),
        "Any power of two does that float32 counts to and that is longer than an execution.",
    ),
    Explained(
        "_core/verdict.py",
        "Verdict.finite",
        "total = self.loss + self.gradients + self.statistics + self.weights + self.slots",
        (),
        ABSORBED,
    ),
    Explained("_core/finiteness.py", "", "_SMALL = 4096", (), SPEED),
    Explained("_core/finiteness.py", "is_finite", "if array.size < _SMALL:", (), SPEED),
    Explained(
        "_core/finiteness.py",
        "",
        "_PIECE = 1 << 18",
        (),
        "Pieces of any size give the same answer; of none NumPy takes 8,192 entries at a time.",
    ),
    Explained(
        "_core/finiteness.py",
        "_pieces",
        'if widen(array[:0] if array.ndim else array).dtype.kind in "fc" and array.size:',
        ('if widen(array[:1] if array.ndim else array).dtype.kind in "fc" and array.size:',),
        "An array of one entry has the dtype of one without any.",
    ),
    Explained("_policy/policy.py", "Sections", "class Sections(TypedDict, total=False):", (), "Only type checkers read it."),
    Explained(
        "_diagnose/evidence.py",
        "Evidence.mechanism",
        "large = max((o.max_abs for o in operands), default=0.0) >= least",
        ("large = max((o.max_abs for o in operands), default=1.0) >= least",),
        "It is compared with 1,000 and more.",
    ),
    Explained(
        "_backends/tensorflow/step.py",
        "Transaction.__init__",
        "*,",
        ("/,",),
        "The body and the state are given by place, all else by name.",
    ),
    Explained(
        "_backends/jax/trace.py",
        "StepTrace._scales_after",
        "if scale is None or counter is None:",
        ("if scale is None and counter is None:",),
        "A state has both of an optimizer, or neither.",
    ),
)
