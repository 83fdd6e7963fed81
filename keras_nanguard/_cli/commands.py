"""The commands of the command line: each calls one public function, prints its report and returns
an exit code. Messages name options in place of arguments: `overwrite=True` becomes `--overwrite`.

Everything except the standard library is imported inside the command that needs it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from keras_nanguard._core.plain_values import one_line

_VALUE = r"=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;()]*[^\s,;().])"

_ELSEWHERE = {"custom_objects": "--import"}
"""Options whose name differs from that of the argument."""


def option_words(command: argparse.ArgumentParser) -> dict[str, str]:
    """Return the options of a command by the names of the Python arguments; `""` for positional
    arguments."""
    found = {}
    for action in command._actions:
        if action.dest not in ("help", "mode"):
            name = action.dest if action.option_strings else "path"
            found[name] = (action.option_strings or [""])[-1]
    known = found.values()
    return {**found, **{name: own for name, own in _ELSEWHERE.items() if own in known}}


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Return a message with each `argument=value` replaced by the option and its value.

    Args:
        text: the message.
        options: the options, from `option_words`.
    """
    if not options:
        return text

    def option_of(match: re.Match[str]) -> str:
        option, value = options[match[1]], match[2]
        if value == "True":
            return option
        if value == "None":
            return f"no {option}"
        plain = value.strip("'\"") if re.fullmatch(r"'[\w.*-]+'", value) else value
        return f"{option} {plain}" if option else value

    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    return re.sub(rf"(?<![\w-])({names}){_VALUE}", option_of, text)


CLEAN, FOUND, MISUSE = 0, 1, 2

CHECKED_POLICY = COMPARED_RUNS = 1
"""Versions of what `check-policy --json` and `report --json` of several runs print."""

Command = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments and returns the exit code."""


def scan(given: argparse.Namespace) -> int:
    """Scan files one after the other; one that cannot be read does not end the command, but is its
    exit code."""
    from keras_nanguard._core.errors import NanGuardError
    from keras_nanguard._files.scan import scan as scan_file

    codes = {CLEAN}
    for path in given.paths:
        try:
            with _progress() as progress:
                report = scan_file(path, progress=progress, **_limits(given))
        except NanGuardError as error:
            print_error(error, given.words)
            codes.add(MISUSE)
            continue
        codes.add(_show(report, given.json, report.ok))
        for entry in report.variables if given.notes and not given.json else ():
            for one in entry.problems:
                if one.severity == "note":
                    print(f"note: {entry.path}: {one.detail}")
    return max(codes)


def print_error(error: Exception, words: Mapping[str, str]) -> None:
    """Print an error in one line, with command line options instead of Python arguments."""
    print(f"keras-nanguard: {in_options(one_line(error), words)}", file=sys.stderr)


def repair(given: argparse.Namespace) -> int:
    """Repair a file."""
    from keras_nanguard._files.repair import repair as repair_file

    names = ("statistics", "weights", "slots", "source", "in_place", "dry_run", "overwrite", "seed")
    options: dict[str, Any] = {name: getattr(given, name) for name in (*names, "only")}
    report = repair_file(given.path, given.output, **options, **_limits(given))
    changes = (replace(c, detail=in_options(c.detail, given.words)) for c in report.changes)
    return _show(replace(report, changes=tuple(changes)), given.json, report.ok)


def recalibrate(given: argparse.Namespace) -> int:
    """Load a model, re-estimate its BatchNormalization statistics from data, and save it."""
    from keras_nanguard._files.loading import data_arrays, load_model, model_output, save_model

    inputs, _ = data_arrays(given.data)
    model = load_model(given.path)
    output = model_output(given.path, given.output, given.overwrite)
    from keras_nanguard._files.recalibrate import recalibrate as estimate

    with _taking_data(given.data):
        options = {"steps": given.steps, "batch_size": given.batch_size, "only": given.only}
        report = estimate(model, inputs, **options)
    save_model(model, given.path, output)
    if given.json:
        _print_json({**report.to_dict(), "output": output})
    else:
        print(report)
        print(f"Written to {output}.")
    return CLEAN


@contextmanager
def _taking_data(path: str) -> Iterator[None]:
    """Convert any exception of Keras about data that do not fit the model to one sentence."""
    from keras_nanguard._core.errors import GuardError, NanGuardError, expected

    try:
        yield
    except NanGuardError:
        raise
    except Exception as error:
        received = f"{path}: {type(error).__name__}: {one_line(error)[:200]}"
        remedy = "Check shapes and names of its inputs."
        raise GuardError(expected("data that the model accepts", received, remedy)) from error


def lint(given: argparse.Namespace) -> int:
    """Load a model and check it for hazards."""
    from keras_nanguard._files.loading import data_arrays, load_model

    data = data_arrays(given.data) if given.data else (None, None)
    model = load_model(given.path)
    from keras_nanguard._lint import lint as lint_model

    report = lint_model(model, *data, ignore=tuple(given.ignore))
    return _show(report, given.json, report.ok)


def check_policy(given: argparse.Namespace) -> int:
    """Check a policy: problems and warnings are findings, a missing file is misuse."""
    from keras_nanguard._core.errors import PolicyError
    from keras_nanguard._policy.policy import Policy, warnings_about

    document: dict[str, Any] = {"format": CHECKED_POLICY, "valid": True, "problems": []}
    try:
        policy = Policy.load(given.policy)
    except PolicyError as error:
        if not error.problems:
            raise
        lines, warnings = list(error.problems), []
        document |= {"valid": False, "problems": lines, "warnings": []}
    else:
        names: tuple[Any, ...] = ()
        if given.model is not None:
            from keras_nanguard._files.loading import model_names

            names = model_names(given.model)
        warnings = list(warnings_about(policy, *names))
        lines = [str(policy), *(f"warning: {warning}" for warning in warnings)]
        document |= {"warnings": warnings, "policy": policy.to_dict()}
    if given.json:
        _print_json(document)
    else:
        print("\n".join(lines))
    return CLEAN if document["valid"] and not warnings else FOUND


def diagnose(given: argparse.Namespace) -> int:
    """Load a model and diagnose it on the first rows of the data."""
    from keras_nanguard._files.loading import data_arrays, first_rows, load_model

    inputs, targets = data_arrays(given.data)
    model = load_model(given.path)
    from keras_nanguard._diagnose.examine import diagnose as examine

    with _taking_data(given.data):
        found = examine(model, first_rows(inputs, given.rows), first_rows(targets, given.rows))
    code = _show(found, given.json, found.healthy)
    if found.error and found.diagnosis.cause == "unknown":
        print(f"keras-nanguard: {found.error}.", file=sys.stderr)
        return MISUSE
    return code


def replay(given: argparse.Namespace) -> int:
    """Replay the step of a bundle; a step that is bad again is a finding."""
    from keras_nanguard._core.errors import BundleError, expected

    # Before a backend is loaded, which takes seconds.
    if not os.path.isfile(os.path.join(given.bundle, "bundle.json")):
        remedy = "It contains bundle.json; see report DIRECTORY."
        raise BundleError(expected("the folder of an incident", repr(given.bundle), remedy))
    from keras_nanguard._diagnose.replay import replay as run

    found = run(
        given.bundle,
        given.model,
        mode=given.mode or "eager",
        dtype=given.dtype,
        device=given.device,
        counterfactuals=not given.plain,
        custom_objects=_custom_objects(given.own),
    )
    return _show(found, given.json, found.result != "bad")


def _custom_objects(modules: Sequence[str]) -> dict[str, Any]:
    """Import modules, also from the current folder, and return their classes and functions by
    name."""
    from keras_nanguard._core.errors import GuardError, expected

    found: dict[str, Any] = {}
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            module = importlib.import_module(name.removesuffix(".py"))
        except (Exception, SystemExit) as error:  # the module may raise anything
            received = f"--import {name}: {type(error).__name__}: {error}"
            remedy = "Run the command in a folder from which Python can import the module."
            raise GuardError(expected("a module that can be imported", received, remedy)) from error
        public = {key: value for key, value in vars(module).items() if not key.startswith("__")}
        found |= {key: value for key, value in public.items() if callable(value)}
    return found


def report(given: argparse.Namespace) -> int:
    """List the incidents of a guarded run, or compare several runs."""
    from keras_nanguard._report import console, files

    if len(given.paths) > 1:
        return _compared(given)
    run = files.read(given.paths[0])
    incidents = run.incidents
    head = console.summary(incidents, len(run.recording) or None, *run.skipped)
    if given.output:
        print(f"Written to {files.write(run, head, given.output)}.")
    elif given.json:
        for incident in incidents:
            _print_json(incident.to_dict())
    else:
        print("\n".join([head, *(console.incident_line(incident) for incident in incidents)]))
    return FOUND if incidents else CLEAN


def _compared(given: argparse.Namespace) -> int:
    """Compare several runs: as text, as HTML, or as JSON, one object a run."""
    from dataclasses import asdict
    from pathlib import Path

    from keras_nanguard._core.errors import GuardError, expected
    from keras_nanguard._report import files, html

    runs, problems = [], []
    for path in given.paths:
        try:
            runs.append(files.read(path))
        except GuardError as error:  # a pattern such as RUNS/* meets other files, too
            problems.append(error)
            print(f"keras-nanguard: skipped {one_line(error)}", file=sys.stderr)
    if not runs:
        raise problems[0]
    if given.output and Path(given.output).suffix != ".html":
        what, remedy = "a path that ends in .html", "Write one report a run, or .html."
        raise GuardError(expected(f"{what} for several runs", f"-o {given.output}", remedy))
    if given.output:
        print(f"Written to {files.save(html.compared(runs), Path(given.output))}.")
    elif given.json:
        for run in runs:
            row = asdict(html.row(run)) | {"causes": dict(run.causes)}
            del row["spark"]
            _print_json({"format": COMPARED_RUNS, **row})
    else:
        print(html.compared_text(runs))
    return FOUND if any(run.incidents for run in runs) else CLEAN


def watch(given: argparse.Namespace) -> int:
    """Show a running fit in the terminal."""
    from keras_nanguard._report.terminal import watch as show

    return FOUND if show(given.directory, given.interval, given.once) else CLEAN


def demo(given: argparse.Namespace) -> int:
    """Run the demonstration."""
    from keras_nanguard._core.errors import GuardError, no_backend

    try:
        from keras_nanguard._cli.demo import run

        return run()
    except ImportError as error:
        raise GuardError(no_backend(error) or str(error)) from error


def _limits(given: argparse.Namespace) -> dict[str, Any]:
    found = {"limit": given.limit, "statistics_limit": given.statistics_limit}
    return {name: value for name, value in found.items() if value is not None}


def _show(report: Any, as_json: bool, ok: bool) -> int:
    """Print a report: JSON if requested, its table on a terminal, plain lines to a pipe or file;
    and return the exit code."""
    if as_json:
        _print_json(report.to_dict())
    elif sys.stdout.isatty() and hasattr(report, "__rich__"):
        from rich.console import Console

        Console().print(report)
    else:
        print(report)
    return CLEAN if ok else FOUND


def _print_json(document: Any) -> None:
    """Print strict JSON: NaN and Inf are strings, as in every record of this library."""
    from keras_nanguard._core.plain_values import plain

    print(json.dumps(plain(document), allow_nan=False))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr if that is a terminal; it disappears at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
