"""Checks the arguments of `NanGuard`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import GuardError, PolicyError, expected, require_keras_3
from keras_nanguard._policy.policy import SECTIONS, Policy
from keras_nanguard._policy.records import nearest, problem, raise_problems, safe_repr
from keras_nanguard._policy.settings import Snapshot

ARGUMENTS = (
    *("policy", "directory", "verbose", "functions", "diagnose", "resume", "logs", "sample_ids"),
)
"""The arguments of `NanGuard` besides the sections of a policy."""


def policy(
    source: Any, sections: Mapping[str, Any], directory: Path | None, resume: bool
) -> Policy:
    """Return the policy of a guard.

    Raises:
        PolicyError: with every problem of source and sections, including unknown arguments.
        GuardError: if the policy needs a directory and there is none, or there is nothing to resume
            from.
    """
    unknown = [_unknown(word, value) for word, value in sections.items() if word not in SECTIONS]
    known = {word: value for word, value in sections.items() if word in SECTIONS}
    try:
        made = Policy.load(source, **known)  # type: ignore[typeddict-item, unused-ignore]
    except PolicyError as error:
        if not error.problems or not unknown:
            raise
        unknown += error.problems
    raise_problems(unknown, "the arguments of NanGuard")
    if resume and "storage" not in made.snapshot.model_fields_set:
        made = Policy.load(made, snapshot={"storage": "disk"})
    _check_snapshots(made.snapshot, directory, resume)
    return made


def _check_snapshots(kept: Snapshot, directory: Path | None, resume: bool) -> None:
    found = "with a policy whose snapshot"
    if kept.storage == "disk" and directory is None:
        why = "resume=True" if resume else f"{found}.storage is 'disk'"
        what, remedy = "a directory to keep snapshots in", 'Write NanGuard(..., directory="run1").'
        raise GuardError(expected(what, f"directory=None, {why}", remedy))
    if resume and kept.storage != "disk":
        what, remedy = "snapshots on disk to resume from", "Omit snapshot.storage."
        raise GuardError(expected(what, f"resume=True, {found}.storage is 'memory'", remedy))
    if resume and not kept.every:
        what, remedy = "snapshots to resume from", 'Write NanGuard(..., snapshot={"every": 100}).'
        raise GuardError(expected(what, f"resume=True, {found}.every is 0", remedy))


def _require(holds: bool, what: str, received: object, remedy: str) -> None:
    if not holds:
        raise GuardError(expected(what, received, remedy))


def _unknown(word: str, value: Any) -> str:
    """Return the problem of an unknown keyword argument."""
    known = f"an argument ({', '.join(ARGUMENTS)}) or a section of a policy ({', '.join(SECTIONS)})"
    return problem(word, known, value, nearest(word, ARGUMENTS) or nearest(word, SECTIONS))


def verbosity(verbose: Any) -> int:
    """Return 0, 1 or 2; True and False are 1 and 0.

    Raises:
        GuardError: for anything else.
    """
    remedy = "Write verbose=1 for a line about each incident, verbose=0 for none."
    is_known = isinstance(verbose, int) and verbose in (0, 1, 2)
    _require(is_known, "verbose to be 0, 1 or 2", f"verbose={safe_repr(verbose)}", remedy)
    return int(verbose)


def folder(directory: Any) -> Path | None:
    """Return the absolute path of the folder for files, or `None`. It stays the same if the working
    directory changes.

    Raises:
        GuardError: if it is not a path, or the path of a file.
    """
    if directory is None:
        return None
    what = "directory to be the path of a folder"
    remedy = 'Write directory="run1", or leave it out to write nothing.'
    is_path = isinstance(directory, (str, os.PathLike))
    _require(is_path, what, f"directory={safe_repr(directory)}", remedy)
    path = Path(directory)
    received = f"directory={safe_repr(str(path))}, "
    try:
        path = path.absolute()
        with contextlib.suppress(OSError):
            path.stat()  # a ValueError for a NUL byte or a lone surrogate, which `is_file` hides
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # or a name that is too long
        raise GuardError(expected(what, f"{received}{error}", remedy)) from error
    _require(not is_file, what, f"{received}a file", remedy)
    return path


def flag(name: str, value: Any) -> bool:
    """Return an argument that is True or False.

    Raises:
        GuardError: for anything else.
    """
    received, remedy = f"{name}={safe_repr(value)}", f"Write {name}=True."
    is_flag = isinstance(value, int) and value in (0, 1)
    _require(is_flag, f"{name} to be True or False", received, remedy)
    return bool(value)


def functions(given: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions that a policy may call, by name.

    Raises:
        GuardError: if it is not a dict of names and functions.
    """
    if given is None:
        return {}
    named = isinstance(given, Mapping) and all(
        isinstance(name, str) and callable(function) for name, function in given.items()
    )
    several = given if isinstance(given, (list, tuple, set)) else [given]
    names = [getattr(one, "__name__", "") for one in several]
    name = next((name for name in names if name.isidentifier()), "notify")
    what, received = "functions to be a dict of names and functions", safe_repr(given)
    _require(named, what, f"functions={received}", f'Write functions={{"{name}": {name}}}.')
    return dict(given)


def require_instance(guard: Any, kind: type[Any], model: Any) -> None:
    """Raise if Keras called a method on the class, because the class was passed as a callback
    instead of a guard.

    Raises:
        GuardError: in that case, or if the model is not one of Keras 3.
    """
    require_keras_3(model)
    name = kind.__name__
    received, remedy = f"the class {name} itself", f"Write callbacks=[{name}()]."
    _require(isinstance(guard, kind), f"a {name} among the callbacks", received, remedy)


def sample_ids(value: Any) -> Any:
    """Return the names of the rows of the data.

    Raises:
        GuardError: if the argument is neither a sequence nor a key.
    """
    is_mapping = isinstance(value, Mapping)
    is_sequence = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if value is None or (is_sequence and not is_mapping):
        return value
    what = "sample_ids to be one name for each row of x, or the key of the batch with the names"
    received, remedy = safe_repr(value), 'Write sample_ids=names or sample_ids="id".'
    if is_mapping:
        received, remedy = f"a dict: {received}", "Write sample_ids=list(...) with one name a row."
    raise GuardError(expected(what, received, remedy))
