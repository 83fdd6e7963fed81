"""Loops without `fit`: their steps are guarded one by one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from keras_nanguard._backends.current import loop_step
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.resume import Resumed
from keras_nanguard._fit.session import Session

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


@contextlib.contextmanager
def watching(session: Session, reporter: Reporter, resumed: Resumed | None) -> Iterator[None]:
    """Return a context for a loop, which resumes from a snapshot if there is one, and ends with the
    table of its incidents."""
    session.start.resuming = resumed
    if resumed is not None:
        reporter.line(resumed.sentence())
    try:
        with loop_step().watching():
            yield
        session.start.restore()  # if the loop had no steps left
        session.finished = True
    finally:
        try:
            reporter.line(session.bad_rows.line())
            reporter.end(session.run.counts)
        finally:
            session.end()


def guarded(
    function: Callable[Arguments, Returned], running: Callable[[], Session]
) -> Callable[Arguments, Returned]:
    """Return a train step as a transaction.

    Args:
        function: the train step.
        running: returns the session of the running loop.
    """
    of_loop = functools.lru_cache(1)(lambda session: loop_step()(function, session))

    @functools.wraps(getattr(function, "python_function", function))
    def step(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        session = running()
        run, called = session.run, of_loop(session)
        if run.access is not called:  # a replay would run the batches of the other function
            run.recent.restart()
            run.access = called
            called.follow()
        returned: Returned = called(*args, **kwargs)
        return returned

    return step
