"""The commands of the command line: each calls one public function, prints its report and returns
an exit code. The first paragraph of its docstring is its help.

Everything except the standard library is imported inside the command that needs it, and what loads
Keras only after its arguments are checked, so that a wrong path is an error at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras_nanguard._cli import output
from keras_nanguard._cli.arguments import (
    COMMANDS as COMMANDS,
    FILES,
    JSON,
    LIMITS,
    MODEL,
    Argument,
    argument,
    choice,
    command,
    count,
    flag,
    new_file,
    number,
    only,
    several,
)
from keras_nanguard._core.plain_values import one_line
from keras_nanguard._files.repair_arrays import CHOICES, RepairOptions

CHECKED_POLICY = COMPARED_RUNS = 1
"""Versions of what `check-policy --json` and `report --json` of several runs print."""


@command(
    argument("paths", "FILE", FILES, nargs="+"),
    *LIMITS,
    JSON,
)
def scan(given: argparse.Namespace) -> int:
    """Find NaN, Inf and values out of range in model files, without building the model.

    A file that cannot be read does not end the command, but is its exit code.
    """
    from keras_nanguard._core.errors import NanGuardError
    from keras_nanguard._files.scan import scan as scan_file

    codes = {output.CLEAN}
    for path in given.paths:
        try:
            with output.progress() as done:
                report = scan_file(
                    path, limit=given.limit, statistics_limit=given.statistics_limit, progress=done
                )
        except NanGuardError as error:
            output.print_error(error)
            codes.add(output.MISUSE)
            continue
        codes.add(output.show(report, given.json))
    return max(codes)


def _method(role: str) -> Argument:
    text = f"what replaces bad {role} (default: {getattr(RepairOptions(), role)})"
    return argument(f"--{role}", None, text, choices=CHOICES[role])


@command(
    argument("path", "FILE", FILES),
    *new_file("NAME.repaired.EXT"),
    *map(_method, CHOICES),
    argument(
        "--source",
        "FILE",
        "good file of the same model; statistics and weights then default to source",
    ),
    only("variables"),
    *LIMITS,
    flag("--in-place", "replace the file; the old one is kept as FILE.bak"),
    flag("--dry-run", "list what would change and write nothing"),
    JSON,
)
def repair(given: argparse.Namespace) -> int:
    """Replace the bad values of a model file, and nothing else, in a new file."""
    from keras_nanguard._files.repair import repair as repair_file

    names = (*CHOICES, "source", "only", "in_place", "dry_run", "overwrite")
    names += ("limit", "statistics_limit")
    options: dict[str, Any] = {name: getattr(given, name) for name in names}
    return output.show(repair_file(given.path, given.output, **options), given.json)


@command(
    MODEL,
    argument("--data", "FILE", "an .npz or .npy file with the inputs (x)", required=True),
    *new_file("NAME.repaired.keras"),
    count("--steps", "number of batches to run (default: all)"),
    count("--batch-size", "number of rows per batch (default: 32)", 32),
    only("layers"),
    JSON,
)
def recalibrate(given: argparse.Namespace) -> int:
    """Re-estimate the statistics of BatchNormalization from data, in a new file."""
    from keras_nanguard._files.loading import data_arrays, load_model, save_model
    from keras_nanguard._files.repair import checked_output

    new = {"overwrite": given.overwrite, "extension": ".keras"}
    path = checked_output(given.path, given.output, **new)
    inputs, _ = data_arrays(given.data)
    model = load_model(given.path)
    from keras_nanguard._files.recalibrate import recalibrate as estimate

    with _taking_data(given.data):
        rows = {"steps": given.steps, "batch_size": given.batch_size}
        report = estimate(model, inputs, only=given.only, **rows)
    save_model(model, given.path, path)
    if given.json:
        output.print_json({**report.to_dict(), "output": path})
    else:
        output.say(report)
        output.say(f"Written to {path}.")
    return output.CLEAN


@contextmanager
def _taking_data(path: str) -> Iterator[None]:
    """Convert any exception of Keras about data that do not fit the model to one sentence."""
    from keras_nanguard._core.errors import GuardError, NanGuardError, expected

    try:
        yield
    except NanGuardError:
        raise
    except Exception as error:
        received = f"{path}: {type(error).__name__}: {one_line(error, 200)}"
        remedy = "Check shapes and names of its inputs."
        raise GuardError(expected("data that the model accepts", received, remedy)) from error


@command(
    MODEL,
    argument("--data", "FILE", "an .npz file with inputs (x) and targets (y) to check, too"),
    several("--ignore", "RULE", "disable a rule"),
    JSON,
)
def lint(given: argparse.Namespace) -> int:
    """Check a model for numeric hazards before it is trained."""
    from keras_nanguard._files.loading import data_arrays, load_model

    data = data_arrays(given.data) if given.data else (None, None)
    model = load_model(given.path)
    from keras_nanguard._lint import lint as lint_model

    report = lint_model(model, *data, ignore=tuple(given.ignore))
    return output.show(report, given.json)


@command(
    MODEL,
    argument("--data", "FILE", "an .npz or .npy file: inputs (x), targets (y)", required=True),
    count("--rows", "number of rows of the data to run (default: 32)", 32),
    JSON,
)
def diagnose(given: argparse.Namespace) -> int:
    """Run one batch in inference and training mode, and report the first bad layer and the
    cause."""
    from keras_nanguard._files.loading import data_arrays, first_rows, load_model

    inputs, targets = data_arrays(given.data)
    model = load_model(given.path)
    from keras_nanguard._diagnose.diagnose import diagnose as examine

    with _taking_data(given.data):
        found = examine(model, first_rows(inputs, given.rows), first_rows(targets, given.rows))
    return output.show(found, given.json)


@command(
    argument("policy", "POLICY", "a .toml, .yaml or .json file, or the name of a preset"),
    argument("--model", "FILE", f"a file of the model, to check names against: {FILES}"),
    JSON,
)
def check_policy(given: argparse.Namespace) -> int:
    """Check a policy, and explain what it will do and which parts of it have no effect.

    Problems and warnings are findings, a missing file is misuse.
    """
    from keras_nanguard._core.errors import PolicyError
    from keras_nanguard._policy.policy import Policy
    from keras_nanguard._policy.warnings import warnings_about

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
        output.print_json(document)
    else:
        output.say("\n".join(lines))
    return output.CLEAN if document["valid"] and not warnings else output.FOUND


@command(
    argument("bundle", "BUNDLE", "folder of the incident: Incident.bundle"),
    argument("--model", "FILE", "a .keras file, if the bundle contains no configuration"),
    several(
        "--import",
        "MODULE",
        "module to import with custom classes and functions of the model",
        dest="custom_objects",
    ),
    choice(
        "mode",
        eager="run the step in eager mode",
        graph="run the step in graph mode",
        xla="compile the step with XLA",
    ),
    argument("--dtype", None, "compute everything in this dtype", choices=("float32",)),
    JSON,
)
def replay(given: argparse.Namespace) -> int:
    """Run the bad step of an incident bundle again and diagnose it.

    A step that is bad again, or fails, is a finding.
    """
    from keras_nanguard._files.bundles import folder_of
    from keras_nanguard._files.formats.limits import refuse_missing

    folder_of(given.bundle)
    if given.model is not None:
        refuse_missing(given.model, "a model file")
    from keras_nanguard._diagnose.replay import replay as run

    found = run(
        given.bundle,
        given.model,
        mode=given.mode,
        dtype=given.dtype,
        custom_objects=_custom_objects(given.custom_objects),
    )
    return output.show(found, given.json)


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


@command(
    argument(
        "paths",
        "REPORT",
        "the directory that was given to NanGuard, or its recording.sqlite; several are compared",
        nargs="+",
    ),
    argument(
        "-o --output",
        "FILE",
        "write a .html page, or a .json or .jsonl file, instead of printing",
    ),
    JSON,
)
def report(given: argparse.Namespace) -> int:
    """Show what happened in a guarded run, or compare several runs."""
    from keras_nanguard._report import console, files

    if len(given.paths) > 1:
        return _compared(given)
    run = files.read(given.paths[0])
    incidents = run.incidents
    if given.output:
        output.say(f"Written to {files.write(run, given.output)}.")
    elif given.json:
        for incident in incidents:
            output.print_json(incident.to_dict())
    else:
        output.say("\n".join([run.summary, *map(console.incident_line, incidents)]))
    return output.FOUND if incidents else output.CLEAN


def _compared(given: argparse.Namespace) -> int:
    """Compare several runs: as text, as HTML, or as JSON, one object a run."""
    from pathlib import Path

    from keras_nanguard._core.errors import GuardError, expected
    from keras_nanguard._report import compare, files

    runs, problems = [], []
    for path in given.paths:
        try:
            runs.append(files.read(path))
        except GuardError as error:  # a pattern such as RUNS/* meets other files, too
            problems.append(error)
            output.say(f"keras-nanguard: skipped {one_line(error)}", sys.stderr)
    if not runs:
        raise problems[0]
    if given.output and Path(given.output).suffix.lower() != ".html":
        what, remedy = "a path that ends in .html", "Write one report a run, or .html."
        raise GuardError(expected(f"{what} for several runs", f"-o {given.output}", remedy))
    if given.output:
        output.say(f"Written to {files.save(compare.page(runs), Path(given.output))}.")
    elif given.json:
        for run in runs:
            row = compare.row(run) | {"causes": dict(run.causes)}
            output.print_json({"format": COMPARED_RUNS, **row})
    else:
        output.say(compare.text(runs))
    return output.FOUND if any(run.incidents for run in runs) else output.CLEAN


@command(
    argument("directory", "DIR", "the directory that was given to NanGuard"),
    argument(
        "--interval",
        "SECONDS",
        "seconds between two updates (default: 1)",
        type=number(float, 0.05, 3600),
        default=1.0,
    ),
    flag("--once", "print one frame and exit; the default if the output is not a terminal"),
)
def watch(given: argparse.Namespace) -> int:
    """Follow a guarded run in the terminal: curves and incidents."""
    from keras_nanguard._report.dashboard import watch as follow

    return output.FOUND if follow(given.directory, given.interval, given.once) else output.CLEAN


@command()
def demo(given: argparse.Namespace) -> int:
    """Train a small network on data with five corrupted images, with and without the guard."""
    from keras_nanguard._cli.demo import run

    return run()
