"""What the program of a step shows, and its division into two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun


def calls_host(jaxpr: Any) -> bool:
    """Return whether a program, or one within it, calls the host, as `jax.debug.print` does."""
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name or equation.primitive.name == "debug_print":
            return True
        values = equation.params.values()
        parts = [p for v in values for p in (v if isinstance(v, (list, tuple)) else (v,))]
        inner = [getattr(part, "jaxpr", part) for part in parts]  # of a closed one
        if any(calls_host(part) for part in inner if hasattr(part, "eqns")):
            return True
    return False


def two_parts(
    program: ClosedJaxpr, judged: int
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Split a program into what does not depend on its first argument, and the rest.

    Args:
        judged: how many of its results the first part must give.

    Returns:
        Two functions: `first(arguments) -> (results, between)`, of the list of the other arguments,
        with all that the second part reads; and `second(argument, between)`, which returns the
        other results. `None` if a result of the first part depends on the first argument.
    """
    jaxpr = program.jaxpr
    dependent, early, late = {id(jaxpr.invars[0])}, [], []
    for equation in jaxpr.eqns:
        if any(id(var) in dependent for var in equation.invars):
            dependent |= {id(var) for var in equation.outvars}
            late.append(equation)
        else:
            early.append(equation)
    results, others = jaxpr.outvars[:judged], jaxpr.outvars[judged:]
    if any(id(var) in dependent for var in results):
        return None
    read = (*(var for equation in late for var in equation.invars), *others)
    inputs = {id(v): v for v in read if id(v) not in dependent and not isinstance(v, Literal)}
    invars = [jaxpr.invars[0], *inputs.values()]
    # JAX 0.4 keeps the names of all arguments and results, and requires one for each.
    drops_names = hasattr(jaxpr.debug_info, "with_unknown_names")
    names: dict[str, Any] = {} if drops_names else {"debug_info": None}
    one = jaxpr.replace(eqns=early, outvars=[*results, *inputs.values()], **names)
    other = jaxpr.replace(eqns=late, constvars=[], invars=invars, outvars=others, **names)
    run_one = jaxpr_as_fun(ClosedJaxpr(one, program.consts))
    run_other = jaxpr_as_fun(ClosedJaxpr(other, ()))

    def first(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = run_one(jnp.zeros((), bool), *arguments)
        return found[:judged], found[judged:]

    return first, lambda argument, between: run_other(argument, *between)
