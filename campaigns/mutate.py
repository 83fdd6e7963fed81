"""Mutation testing: does a test fail if the code has a small mistake?

Runs the mutants of the modules that decide about a step.

    make mutate                                    everything; takes hours, continues if interrupted
    python campaigns/mutate.py --make rules        make the mutants of a group; needs cosmic-ray
    python campaigns/mutate.py rules --at-most 5   run some of them
    python campaigns/mutate.py --write campaigns/results/mutate.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns import pages
from campaigns.equivalent_mutants import EXPLAINED, Explained
from campaigns.mutants import PACKAGE, Mutant, mutants

__all__ = ["GROUPS", "Group", "drawn", "explanation", "survivors", "table"]

ROOT = PACKAGE.parent
FOLDER = ROOT / "build" / "mutants"
NOTICED = ("killed", "timeout")
COLUMNS = ("mutants", "run", "killed", "timeout", "equivalent", "survived")


@dataclass(frozen=True)
class Group:
    """Modules that are mutated in one process.

    Attributes:
        modules: their paths within the package.
        tests: the tests that may detect a mutant; each mutant runs those of them that execute its
            line.
        backend: the backend that they need.
        budget: maximum processor seconds of tests for one mutant.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    backend: str = "tensorflow"
    budget: float = 60.0


CAUSES = ("tests/diagnosis/test_causes.py", "tests/diagnosis/test_decided.py")
MODES = ("graph", "eager", "steps4")
FIRST = tuple(f"first_and_last_step_bad[{build}]" for build in ("plain", "unbuilt"))
SHARP = (
    *(f"tests/transaction/test_transaction.py::test_bad_batches_never_happened[adam-{mode}]" for mode in MODES),
    *(f"tests/transaction/test_transaction.py::test_{name}" for name in FIRST),
    *(f"tests/transaction/test_transaction.py::test_every_batch_bad[{mode}]" for mode in ("graph", "steps4")),
    "tests/report/test_logs.py::test_ordinary_overflows",
)
"""A few tests of TensorFlow and JAX; each traces or compiles for seconds."""

FITS = (
    *(f"tests/transaction/test_transaction.py::test_bad_batches_never_happened[adam-{mode}]" for mode in ("xla", "steps4")),
    f"tests/transaction/test_transaction.py::test_{FIRST[1]}",
    "tests/transaction/test_transaction.py::test_every_batch_bad[steps4]",
    "tests/report/test_logs.py::test_ordinary_overflows",
)
"""Fewer of them for TensorFlow, because tests of single steps cover most of the same."""

OWN_STEPS = tuple(
    f"tests/backends/tensorflow/test_own_steps.py::test_bad_batches_leave_nothing_behind[{name}-graph]"
    for name in ("lowers its rate", "reads its weights", "writes a variable", "trains a tf.Variable")
)
OWN_STEPS += ("tests/backends/tensorflow/test_own_steps.py::test_bad_batches_leave_nothing_behind[writes a variable-eager]",)
ON_TENSORFLOW = ("tests/backends/tensorflow/test_alone.py",)
ON_JAX = ("step", "deferred_verdict", "watched")
ON_TORCH = ("step", "alone", "own_steps", "cost", "undo_log", "companions")

GROUPS = {
    "rules": Group(
        (
            *("_backends/shared/rules.py", "_core/verdict.py", "_core/finiteness.py"),
            *(f"_policy/{name}.py" for name in ("decide", "settings", "policy")),
            *("_diagnose/causes.py", "_diagnose/evidence.py"),
        ),
        ("tests/core", "tests/policy", "tests/report/test_policy_warnings.py", *CAUSES, "tests/backends/test_rules.py"),
    ),
    "tensorflow": Group(
        tuple(f"_backends/tensorflow/{name}.py" for name in ("trace", "step")),
        (*FITS, *OWN_STEPS, *ON_TENSORFLOW),
        budget=120.0,
    ),
    "jax": Group(
        ("_backends/jax/trace.py",),
        (*SHARP, *(f"tests/backends/jax/test_{name}.py" for name in ON_JAX)),
        "jax",
        budget=120.0,
    ),
    "torch": Group(
        tuple(
            f"_backends/torch/{name}.py"
            for name in ("step", "execution", "intercept", "watching", "attempt", "undo_log")
        ),
        (*(f"tests/backends/torch/test_{name}.py" for name in ON_TORCH), *SHARP, "-k", "not process"),
        "torch",
        budget=40.0,
    ),
    "run": Group(
        tuple(f"_fit/{name}.py" for name in ("incidents", "rollback", "snapshots", "divergence", "proof")),
        tuple(
            f"tests/recovery/test_{name}.py"
            for name in (
                *("recovery", "decisions", "snapshots", "divergence", "whole_states", "actions", "noise"),
                *("range_of_loss_scale", "replayed_steps", "schedule_poles", "trials"),
            )
        ),
        "torch",
        budget=60.0,
    ),
}


def make(modules: Iterable[str], folder: Path) -> None:
    """Make the mutants of modules whose source has changed since the last time."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        file, digest = _file(module, folder), _digest(module)
        if not file.exists() or file.read_text("utf-8").partition("\n")[0] != digest:
            file.write_text("\n".join([digest, *(json.dumps(asdict(mutant)) for mutant in mutants(module))]) + "\n", "utf-8")


def made(module: str, folder: Path) -> list[Mutant]:
    """Return the mutants of a module.

    Raises:
        SystemExit: if its source has changed since they were made.
    """
    file = _file(module, folder)
    first, *lines = file.read_text("utf-8").splitlines() if file.exists() else [""]
    if first != _digest(module):
        raise SystemExit(f"Expected mutants of {module} as it is. Received: none. Make them with --make, where cosmic-ray is installed.")
    return [Mutant(**json.loads(line)) for line in lines]


def _file(module: str, folder: Path) -> Path:
    return folder / f"{module.removesuffix('.py').replace('/', '.')}.jsonl"


def _digest(module: str) -> str:
    return hashlib.sha256((PACKAGE / module).read_bytes()).hexdigest()


def drawn(of: Sequence[Mutant], at_most: int) -> list[Mutant]:
    """Return the mutants to run: all, or this many, selected by a checksum, which selects nearly
    the same ones after a change elsewhere.
    """
    by_chance = sorted(of, key=lambda mutant: hashlib.sha256(mutant.key.encode()).digest())
    return sorted(by_chance[: at_most or None], key=lambda mutant: mutant.start)


def results(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of the latest run of each mutant by its key."""
    path = folder / f"{name}.results"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def explanation(found: dict[str, Any] | Mutant) -> Explained | None:
    """Return why no test can detect a mutant, `None` if there is no explanation."""
    of = asdict(found) if isinstance(found, Mutant) else found
    return next((one for one in EXPLAINED if one.covers(of["module"], of["function"], of["before"], of["after"])), None)


def survivors(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the mutants of a group that no test has detected and that are not explained."""
    chosen = {mutant.key for module in GROUPS[name].modules for mutant in made(module, folder)}
    found = [found for key, found in results(name, folder).items() if key in chosen]
    return [one for one in found if one["outcome"] not in NOTICED and explanation(one) is None]


def table(folder: Path, earlier: str = "") -> str:
    """Return the table of all modules; a module without results here keeps its earlier row."""
    lines = ["| module | mutants | run | killed | timeout | equivalent | survived | score |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    rows = {cells[0]: Counter(dict(zip(COLUMNS, map(int, cells[1:7])))) for cells in pages.rows(earlier)}
    whole: Counter[str] = Counter()
    for name, group in GROUPS.items():
        known, ran = results(name, folder), run_here(name, folder)
        for module in group.modules:
            if module in ran or f"`{module}`" not in rows:
                mutants_of = made(module, folder)
                run = [known[mutant.key] for mutant in mutants_of if mutant.key in known]
                rows[f"`{module}`"] = Counter(found["outcome"] if found["outcome"] in NOTICED else _why(found) for found in run)
                rows[f"`{module}`"].update(mutants=len(mutants_of), run=len(run))
            lines.append(_row(f"`{module}`", rows[f"`{module}`"]))
            whole += rows[f"`{module}`"]
    return "\n".join([*lines, _row("all", whole)])


def run_here(name: str, folder: Path) -> set[str]:
    """Return the modules of a group whose mutants have results in this folder."""
    return {found["module"] for found in results(name, folder).values()}


def joined(earlier: str, text: str, folder: Path) -> str:
    """Return a table of rows that begin with a module, with the earlier rows of modules without
    results here. Rows of modules that are no longer mutated go.
    """
    ran = {module for name in GROUPS for module in run_here(name, folder)}
    order = [module for group in GROUPS.values() for module in group.modules]
    kept = [line for line in earlier.strip().splitlines()[2:] if _module(line) in {*order} - ran]
    head, rows = text.splitlines()[:2], [line for line in text.splitlines()[2:] if _module(line) in ran]
    return "\n".join([*head, *sorted([*kept, *rows], key=lambda line: order.index(_module(line)))])


def share() -> str:
    """Return the sentence about the share of the package that the mutated modules are."""
    modules = {path: len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    chosen = [PACKAGE / module for group in GROUPS.values() for module in group.modules]
    lines, whole = sum(modules[path] for path in chosen), sum(modules.values())
    part = f"{lines:,} of the {whole:,} lines of the package ({lines / whole:.0%})".replace("%)", " %)")
    return f"They hold {part}, {len(chosen)} of {len(modules)} modules."


def _module(line: str) -> str:
    return line.partition("`")[2].partition(".py")[0] + ".py"


def _why(found: dict[str, Any]) -> str:
    return "survived" if explanation(found) is None else "equivalent"


def _row(name: str, count: Counter[str]) -> str:
    seen, missed = count["killed"] + count["timeout"], count["survived"]
    score = f"{100 * seen / (seen + missed):.1f} %" if seen + missed else ""
    return f"| {name} | {' | '.join(str(count[column]) for column in COLUMNS)} | {score} |"


def explained_table(folder: Path) -> str:
    """Return the table of the mutants that survive because they are equivalent to the code."""
    found = [one for name in GROUPS for one in results(name, folder).values() if one["outcome"] not in NOTICED]
    lines = ["| where | in place of | mutants | why no test can see it |", "|---|---|---:|---|"]
    for one in EXPLAINED:
        number = sum(explanation(mutant) is one for mutant in found)
        if number:
            place = f"`{one.module}::{one.function}`" if one.function else f"`{one.module}`"
            code = one.before.replace("\n", " ").replace("|", "\\|")
            lines.append(f"| {place} | `{code}` | {number} | {one.why} |")
    return "\n".join(lines)


def survivors_table(folder: Path) -> str:
    """Return the table of the mutants that no test has detected and that are not explained."""
    lines = ["| where | in place of | stood |", "|---|---|---|"]
    for name in GROUPS:
        if not results(name, folder):
            continue
        for found in sorted(survivors(name, folder), key=lambda found: (found["module"], found["line"])):
            code = [found[which].replace("\n", " ").replace("|", "\\|") for which in ("before", "after")]
            lines.append(f"| `{found['module']}::{found['function']}` | `{code[0]}` | `{code[1]}` |")
    return "\n".join(lines)


def run(name: str, given: argparse.Namespace) -> None:
    """Run the mutants of a group that have not run yet, and print those that no test detects."""
    from campaigns import mutant_runs

    group = GROUPS[name]
    os.environ["KERAS_BACKEND"] = group.backend
    chosen = [mutant for module in given.modules or group.modules for mutant in drawn(made(module, given.folder), given.at_most)]
    known = [key for key, found in results(name, given.folder).items() if not given.again or found["outcome"] in NOTICED]
    known += [mutant.key for mutant in chosen if given.again and explanation(mutant)]
    plugin = mutant_runs.Runs(group.modules, chosen, given.folder, name, given.budget or group.budget, known)
    mutant_runs.run(given.tests or group.tests, [plugin])
    for found in survivors(name, given.folder):
        print(found["outcome"], f"{found['module']}:{found['line']}", found["function"], "\n   ", found["before"], "\n   ", found["after"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("group", nargs="?", choices=GROUPS)
    parser.add_argument("--make", nargs="+", choices=GROUPS, default=[], help="make the mutants of these groups")
    parser.add_argument("--write", type=Path, help="write the tables into this page")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of mutants and results")
    parser.add_argument("--modules", nargs="*", help="only these")
    parser.add_argument("--tests", nargs="*", help="tests to run instead of those of the group")
    parser.add_argument("--at-most", type=int, default=0, help="maximum number per module, selected by a checksum; 0 for all")
    parser.add_argument("--budget", type=float, help="processor seconds of tests for one mutant")
    parser.add_argument("--again", action="store_true", help="run again those that survived and are not explained")
    given = parser.parse_args(arguments)
    make([module for name in given.make for module in GROUPS[name].modules], given.folder)
    if given.group:
        run(given.group, given)
    if given.write:
        pages.write(given.write, "mutate", table(given.folder, pages.read(given.write, "mutate")))
        for name, text in (("survivors", survivors_table(given.folder)), ("equivalent", explained_table(given.folder))):
            pages.write(given.write, name, joined(pages.read(given.write, name), text, given.folder))
        pages.write(given.write, "share", share())


if __name__ == "__main__":
    main()
