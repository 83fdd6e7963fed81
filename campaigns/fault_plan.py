"""The faults of the campaign, with the expected detection, result and cause of each."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

__all__ = ["HUGE", "SITES", "Fault", "causes", "expected", "flipped", "judged", "plan", "repairs"]

SITES = ("inputs", "targets", "loss", "gradients", "weights", "statistics", "slots", "loss_scale")

IN_STATE = ("weights", "statistics", "slots", "loss_scale")

HUGE = 1e30
"""Magnitude above which a number is called huge."""

LARGE = 1e3
"""A flipped number is called large if it exceeds the largest of its tensor, and 1, by this factor.
"""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: its number within its configuration.
        way: `data` (the arrays that `fit` is given), `inject` (`testing.inject`) or `flip` (a bit of the state, between two steps).
        site: one of `SITES`.
        kind: as for `testing.inject`; `bit` of a flip.
        step: the train step.
        row: the row of the batch.
        entries: how many entries, from the first; `None` for all.
        path: glob that matches the path of variables.
        hook: number of its injection, which several faults of a configuration share.
        place: variable and entry of the flipped bit, as two numbers between 0 and 1.
        bit: number of the bit, counted from the highest, the sign.
        run: number of its run, which is the number of the first fault in the run.
    """

    number: int
    way: str
    site: str
    kind: str
    step: int
    row: int = 0
    entries: int | None = 1
    path: str = "*"
    hook: int = -1
    place: tuple[float, float] = (0.0, 0.0)
    bit: int = -1
    run: int = -1


IN_ONE_RUN = 6
"""Number of faults that share a run if each only excludes its batch from training."""

WAYS = ("data", "inject", "flip")
"""The ways in which a fault is injected."""

FINITE = {("inputs", "overflow"), ("targets", "overflow")}
"""Sites and kinds of finite numbers in the batch."""

NONFINITE = ("nan", "inf", "-inf")

BITS = (1, 1, 1, 1, 1, 1, 2, 3, 4, 6, 0, 12)
"""Flipped bits, counted from the sign, by frequency: most often the top bit of the exponent, then
its other bits, the sign, the mantissa.
"""

INJECTED = {
    "inputs": (*NONFINITE, "overflow"),
    "targets": (*NONFINITE, "overflow"),
    "loss": (*NONFINITE, "overflow"),
    "gradients": (*NONFINITE, "overflow"),
    "weights": (*NONFINITE, "overflow"),
    "statistics": (*NONFINITE, "overflow"),
    "slots": ("nan", "inf", "overflow"),
    "loss_scale": ("nan", "inf", "zero", "overflow"),
}
"""The kinds of faults for each injected site."""

HOOKS = {"loss": 2, "gradients": 3, "weights": 2, "slots": 1}
"""Number of injections of each site in one configuration, besides one for statistics and one for
the loss scale if the model has them.
"""

OF_BATCH = 3
"""One of this many configurations also has injections for inputs and targets. They slow down every
step, and `data` covers the same faults.
"""


def plan(
    name: str,
    count: int,
    steps: int,
    batch: int,
    precision: str,
    has: Sequence[str],
    together: int = 1,
    ways: Sequence[str] = WAYS,
    finite: bool = True,
    earliest: int = 0,
) -> list[Fault]:
    """Return the faults of one configuration.

    Args:
        name: its name, which is the random seed.
        count: number of faults.
        steps: the length of a run.
        batch: rows of a batch.
        precision: the dtype policy.
        has: sites that only some configurations have, of `statistics` and `loss_scale`.
        together: steps in one execution; other code can write the state only between two
            executions.
        ways: how they are injected.
        finite: whether there are also faults with finite numbers in the batch.
        earliest: the first step before which a write to the state is detected.
    """
    draw = random.Random(zlib.crc32(name.encode()))
    at = [0, draw.randrange(1, 4), draw.randrange(4, steps // 2), draw.randrange(steps // 2, steps - 2)]
    hooks = [hook for hook in _hooks(draw, has, batch) if finite or hook[:2] not in FINITE]
    found: list[Fault] = []
    while len(found) < count:
        number, of = len(found), draw.random()
        way = next(way for way, share in zip(WAYS, (0.3, 0.75, 1.0)) if of < share)
        if way not in ways:
            way = ways[0] if of < 0.6 else ways[-1]
        if way == "data":
            site = draw.choice(("inputs", "inputs", "targets"))
            kind = draw.choice((*NONFINITE, *INJECTED[site]) if finite else NONFINITE)
            found.append(Fault(number, way, site, kind, draw.choice(at), draw.randrange(batch), draw.choice((1, 1, 3, None))))
        elif way == "inject":
            hook = number % len(hooks)
            site, kind, row, entries, path = hooks[hook]
            step = draw.choice(at)
            step = max(step, earliest) if site in IN_STATE else step
            found.append(Fault(number, way, site, kind, step, row, entries, path, hook))
        else:
            site = draw.choice(["weights", "weights", "slots"] + [s for s in has if s == "statistics"])
            between = [max(step - step % together, together) for step in at]
            place, bit = (draw.random(), draw.random()), draw.choice(BITS)
            found.append(Fault(number, way, site, "bit", draw.choice(between), place=place, bit=bit))
    return _in_runs(found, draw, steps, precision)


def _in_runs(faults: list[Fault], draw: random.Random, steps: int, precision: str) -> list[Fault]:
    """Return the faults with their runs. Faults that only exclude their batch share a run, at
    different steps.
    """
    placed: list[Fault] = []
    for way in ("data", "inject"):
        alike = [f for f in faults if f.way == way and _leaves_nothing(f, precision)]
        size = min(IN_ONE_RUN, steps // 3)
        for first in range(0, len(alike), size):
            share = alike[first : first + size]
            at = draw.sample(range(0, steps, 2), len(share))
            placed += [replace(f, run=share[0].number, step=step) for f, step in zip(share, at)]
    shared = {f.number for f in placed}
    return placed + [replace(f, run=f.number) for f in faults if f.number not in shared]


def _leaves_nothing(fault: Fault, precision: str) -> bool:
    """Whether refusing a step with this fault only excludes its batch."""
    of_batch = fault.site in ("inputs", "targets") and fault.kind in NONFINITE
    of_step = fault.site in ("loss", "gradients") and repairs(fault, precision, 1) == "without"
    return of_batch or (of_step and not stays_finite(fault, precision))


def _hooks(draw: random.Random, has: Sequence[str], batch: int) -> Iterator[tuple[str, str, int, int | None, str]]:
    """Yield site, kind, row, entries and path of each injection of a configuration."""
    of_batch = {} if draw.randrange(OF_BATCH) else {"inputs": 1, "targets": 1}
    for site, number in {**of_batch, **HOOKS, **dict.fromkeys(has, 1)}.items():
        for kind in draw.sample(INJECTED[site], number):
            paths = ("*", "*kernel", "*bias") if site in ("weights", "gradients") else ("*",)
            yield site, kind, draw.randrange(batch), draw.choice((1, 1, None)), draw.choice(paths)


# Expected detection


def flipped(array: np.ndarray[Any, Any], entry: int, bit: int) -> np.ndarray[Any, Any]:
    """Return a copy of an array with one bit of one entry flipped, counted from its sign."""
    array = np.array(array)
    words = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    words[entry] ^= words.dtype.type(1 << (8 * array.dtype.itemsize - 1 - bit))
    return array


def judged(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> str:
    """Return the kind of the changed entry: `nonfinite`, `huge`, `large` or `ordinary`."""
    bad = np.abs(np.asarray(after, "float64"))
    if not np.isfinite(bad).all():
        return "nonfinite"
    if bad.max() > HUGE:
        return "huge"
    most = max(float(np.abs(np.asarray(before, "float64")).max()), 1.0)
    return "large" if bad.max() > LARGE * most else "ordinary"


def stays_finite(fault: Fault, precision: str, becomes: str = "") -> bool:
    """Whether a fault may leave finite numbers in loss, gradients or state. The guard refuses such a
    step only if NaN or Inf follows from them.

    Args:
        fault: the fault.
        precision: the dtype policy. Under `mixed_float16` gradients of this size overflow.
        becomes: for a flipped bit, the result of `judged`.
    """
    if fault.way == "flip":
        return becomes != "nonfinite"
    of_step = fault.site in ("loss", "gradients") and precision != "mixed_float16"
    return fault.kind == "overflow" and (of_step or fault.site in ("weights", "statistics", "slots"))


def expected(fault: Fault, precision: str, becomes: str = "", ruins: bool = True) -> str:
    """Return the expected detection of a fault: `incident`, `overflow` (refused and counted, but no
    incident), `either` of these, or `may` if none is required.

    Under `mixed_float16` dynamic loss scaling handles gradients that are not finite: a single
    overflow is not an incident. A loss times 3e38 is Inf if it was above 1, otherwise its gradient
    overflows.

    Args:
        fault: the fault.
        precision: the dtype policy.
        becomes: for a flipped bit, the result of `judged`.
        ruins: for a finite number in the batch, whether stock Keras ends with NaN or Inf in the model because of it.
    """
    if stays_finite(fault, precision, becomes):
        return "may"
    if fault.site in ("inputs", "targets") and fault.kind == "overflow":
        return "incident" if ruins else "may"
    if fault.site == "gradients" and precision == "mixed_float16":
        return "overflow"
    if fault.site == "loss" and fault.kind == "overflow" and precision == "mixed_float16":
        return "either"
    return "incident"


def repairs(fault: Fault, precision: str, together: int, becomes: str = "") -> str:
    """Return the undisturbed run with which a run with this fault must agree, bit for bit.

    `without`: the run without the batch of that step. `scaled`: the same, with the loss scale after
    the refusal. `again`: the run with every batch, because the state is restored and the steps are
    replayed. `either`: `again` or `without`, because a step that a bad slot or a huge number does
    not affect may commit. `since`: the run that begins after that execution, because several steps
    in one execution are not replayed.
    """
    overflows = fault.site == "gradients" or (fault.site == "loss" and fault.kind == "overflow")
    if fault.site == "loss_scale" or (overflows and precision == "mixed_float16"):
        return "scaled"
    if fault.site in ("inputs", "targets", "loss", "gradients"):
        return "without"
    if together > 1:
        return "since"
    return "either" if fault.site == "slots" or becomes == "huge" or fault.kind == "overflow" else "again"


# Right causes

RIGHT: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("inputs", "nonfinite"): (("input_nonfinite",), "NaN or Inf came with x"),
    ("inputs", "overflow"): (("input_scale",), "a finite input is so large that the first layer blows up"),
    ("targets", "nonfinite"): (("target_nonfinite",), "NaN or Inf came with y"),
    ("targets", "overflow"): (
        ("target_out_of_range", "input_scale"),
        "no probability is 3e38, and a cross entropy does not accept it; to a squared error it is a finite target that is far too large",
    ),
    ("loss", "any"): (("transient",), "nothing in batch, state or model makes it: the same step on the same state is finite"),
    ("gradients", "any"): (("transient",), "nothing in batch, state or model makes it: the same step on the same state is finite"),
    ("weights", "any"): (("state_nonfinite",), "other code has written it between two steps"),
    ("slots", "any"): (("state_nonfinite",), "other code has written it: to blame the optimizer or its rate would be wrong"),
    ("statistics", "any"): (
        ("state_nonfinite", "batchnorm_statistics"),
        "other code has written it; that moving statistics are not finite or huge is the meaning of the second one, too",
    ),
    ("loss_scale", "any"): (("loss_scale_collapsed",), "a scale of 0, NaN, Inf or 3e38 can scale nothing"),
}
"""The right causes of a fault of this site and kind, and the reason."""

OF_FLOAT16 = ("float16_overflow",)
"""Also right for a finite number above 65504 under mixed_float16, because the same step in float32
is healthy.
"""

OF_LARGE = ("spike", "divergence")
"""Also right for a bit that leaves a large finite number, because only its effect on the loss is
known.
"""


def causes(fault: Fault, precision: str, becomes: str = "") -> tuple[str, ...]:
    """Return the right causes of a fault."""
    kind = "nonfinite" if fault.kind in NONFINITE else fault.kind
    right = RIGHT.get((fault.site, kind), RIGHT.get((fault.site, "any"), ((), "")))[0]
    finite = fault.kind == "overflow" or becomes in ("huge", "large", "ordinary")
    more = OF_FLOAT16 if finite and precision == "mixed_float16" and fault.site in ("inputs", "weights") else ()
    return (*right, *more, *(OF_LARGE if becomes in ("large", "ordinary") else ()))
