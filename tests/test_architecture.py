"""docs/architecture.md and CONTRIBUTING.md agree with the code."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from support import zoo
from test_layout import BACKENDS, PACKAGE, modules

from keras_nanguard import NanGuard
from keras_nanguard._core.incident import Decision, Diagnosis, Finding, Incident, Outcome
from keras_nanguard._core.verdict import Report, Verdict

ROOT = Path(__file__).parents[1]
ARCHITECTURE, CONTRIBUTING = ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"
BASES = (ROOT, ROOT / "keras_nanguard")
"""Paths on the two pages are relative to the repository or to the package."""

PLACE = r"(?:(?:[\w.-]+/)+[\w.-]*|[\w.-]+\.(?:py|toml|cfg)|_[a-z]+|Makefile)(?:::[\w.]+)?"
DOTTED = r"_[a-z]\w*(?:\.\w+)+|[A-Z]\w+\.\w+"
OURS = r"(?:_[a-z]+|keras_nanguard|tests|benchmarks|examples|docs)/[\w./-]*(?:::[\w.]+)?"
"""Paths and names on the two pages, modules and names in one, paths on other pages."""

NOT_THERE = {"tests/backends/NAME", "build/scale", "build/soak", "docs/NAME.md", "keras_nanguard/policies/NAME.toml", "Optimizer.apply"}
"""Files that a recipe or a campaign creates, and names of Keras."""


@functools.cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# What the pages name


def spans(page: Path) -> set[str]:
    """Return the texts in backticks on a page, and its commands, NAME replaced by each backend."""
    prose = re.sub(r"^```.*?^```", "", text(page), flags=re.M | re.S)
    found = {*re.findall(r"`([^`\n]+)`", prose), *re.findall(r"\btests/[\w./]+\.py", text(page))} - NOT_THERE
    return {span.replace("NAME", backend) for span in found for backend in BACKENDS}


def references() -> list[str]:
    """Return each path, `path::name` and dotted name of the two pages, and each path of others."""
    found = {span for page in (ARCHITECTURE, CONTRIBUTING) for span in spans(page) if re.fullmatch(f"{PLACE}|{DOTTED}", span)}
    others = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return sorted(found.union(*({span for span in spans(page) if re.fullmatch(OURS, span)} for page in others)))


@functools.cache
def names(path: Path) -> frozenset[str]:
    """Return the names that a module defines, and `Class.name` for names within its classes."""

    def bound(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from bound(node.body, f"{node.name}.")
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))

    return frozenset(bound(ast.parse(path.read_text(encoding="utf-8")).body))


def located(path: str) -> Path | None:
    return next((base / ending for base in BASES for ending in (path, f"{path}.py") if (base / ending).exists()), None)


@pytest.mark.parametrize("reference", references())
def test_names_on_the_pages_exist(reference):
    """Each path exists and defines the names given for it; dotted names are modules or in one."""
    if re.fullmatch(DOTTED, reference):
        everywhere = [f"{module}.{name}".lstrip(".") for module in modules() for name in ("", *names(modules()[module]))]
        assert any(f".{known}.".endswith(f".{reference}.") for known in everywhere), f"there is no {reference}"
        return
    path, _, name = reference.partition("::")
    found = located(path)
    assert found is not None, f"there is no {path}"
    assert not name or name in names(found), f"{path} has no {name}"


def test_the_commands_of_the_pages_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", text(ROOT / "Makefile"), re.M))
    named = {name for page in (ROOT / "README.md", CONTRIBUTING) for name in re.findall(r"`make ([\w-]+)", text(page))}
    assert len(named) > 8
    assert named - targets == set()


# The paths of a step


ENTERED = {"healthy": 8, "refused": 60}
"""Maximum number of files that a step enters on TensorFlow, with all helpers."""

RECORDS = (Verdict, Report, Finding, Incident, Diagnosis, Decision, Outcome)
HANDED = {"healthy": 4, "refused": 15}
"""Maximum number of files with a function that receives or returns one of these records."""


def _is_record(value: object) -> bool:
    return isinstance(value, RECORDS) or (isinstance(value, (tuple, list)) and any(isinstance(item, RECORDS) for item in value))


@functools.cache
def _in_package(file: str) -> str:
    """Return the path of a file within the package, `""` for other files."""
    return str(Path(file).relative_to(PACKAGE)) if PACKAGE in Path(file).parents else ""


@pytest.mark.requires_backend("tensorflow", reason="the numbers are of one backend")
def test_files_that_a_step_enters():
    """Follows a healthy step and the first refused one, without imports on first use."""
    data = zoo.regression(batches=6)
    zoo.poison(data, 5)
    entered: dict[str, set[str]] = {"healthy": set(), "refused": set()}
    handed: dict[str, set[str]] = {"healthy": set(), "refused": set()}

    class Follow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            step = {4: "healthy", 5: "refused"}.get(batch, "")

            def follow(frame, event, returned):
                file, code = _in_package(frame.f_code.co_filename), frame.f_code
                if not file or event not in ("call", "return") or code.co_name == "<module>":
                    return
                given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
                entered[step].add(file)
                if any(map(_is_record, given if event == "call" else [returned])):
                    handed[step].add(file)

            sys.setprofile(follow if step else None)

        def on_train_batch_end(self, batch, logs=None):
            sys.setprofile(None)

    zoo.run(zoo.plain, data, guard=NanGuard(), epochs=1, callbacks=[Follow()])
    for name, files in entered.items():
        assert 5 < len(files) <= ENTERED[name], f"a {name} step enters {len(files)} files: {sorted(files)}"
        assert 2 < len(handed[name]) <= HANDED[name], f"{len(handed[name])} files: {sorted(handed[name])}"
