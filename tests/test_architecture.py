"""docs/architecture.md, CONTRIBUTING.md and the recipes in it agree with the code."""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import keras
import pytest
from diagnosis.test_decided import CASES
from support import zoo
from support.docs_tools import load
from test_layout import BACKENDS, KNOW_NO_KERAS, ORDER, PACKAGE, edges, modules

from campaigns import mutate, short_suite
from keras_nanguard import NanGuard, actions
from keras_nanguard._core.incident import Decision, Diagnosis, Finding, Incident, Outcome
from keras_nanguard._core.literals import CAUSE_WORDS, CAUSES
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.perform import PERFORMERS
from keras_nanguard._report.console import CHANGES

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


def section(page: Path, heading: str) -> str:
    return text(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(table: str) -> list[list[str]]:
    """Return the cells of each row of the first table in a text, without its head."""
    lines = re.search(r"(?:^\|.*\n)+", table, re.M).group().splitlines()  # type: ignore[union-attr]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


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


def test_the_tests_that_campaigns_run_exist():
    """A name that is gone would end a campaign of hours, or the tests of each release, at once."""
    run = {test for group in mutate.GROUPS.values() for test in group.tests} | set(short_suite.tests_of("tensorflow"))
    named = [re.fullmatch(r"(tests/[\w/.]+)((?:::\w+)*)(?:\[.+\])?", test) for test in run - {"-k", "not process"}]
    places = [(located(found[1]), found[2][2:].replace("::", ".")) for found in named if found]
    assert len(places) == len(named) > 40
    gone = [place for place in places if place[0] is None or (place[1] and place[1] not in names(place[0]))]
    assert gone == []


# The packages


def test_the_table_of_packages_is_the_order_of_the_layout():
    """One row for each package, from bottom to top; the same ones load without Keras."""
    table = rows(section(ARCHITECTURE, "Packages"))
    order = [tuple(re.findall(r"`(\w+)`", cells[0])) for cells in table]
    assert sorted(map(sorted, order)) == sorted(map(sorted, ORDER))
    assert [set(row) for row in order] == [set(names) for names in ORDER]
    without = {name for cells, names in zip(table, order) for name in names if cells[2] == "yes" or f"`{name}`" in cells[2]}
    assert without == set(KNOW_NO_KERAS)
    assert all(len(cells) == 3 and all(cells) for cells in table)


def test_the_picture_shows_the_imports():
    """Arrows are the direct imports between packages; colours show which load without Keras."""
    drawn = load("packages_picture")
    direct: dict[str, set[str]] = {}
    for module in set(modules()) - {""}:
        own = module.partition(".")[0]
        direct.setdefault(own, set()).update({other.partition(".")[0] for other in edges(module)} - {own, "_version"})

    def beyond(package: str) -> set[str]:
        return direct[package].union(*map(beyond, direct[package])) if direct[package] else set()

    implied = {(one, far) for one in direct for other in direct[one] for far in beyond(other)}
    assert set(drawn.ARROWS) == {(one, other) for one in direct for other in direct[one]} - implied
    assert set(drawn.PLACES) == set(direct) - {"_version"}
    assert set(KNOW_NO_KERAS) - {"_version"} == drawn.WITHOUT_KERAS


def test_the_picture_is_drawn_and_shown():
    """The file is the output of `docs/packages_picture.py`, complete, and shown on the page."""
    drawn = load("packages_picture")
    assert text(drawn.PICTURE) == drawn.picture()
    assert all(f">{name}</text>" in drawn.picture() for name in drawn.PLACES)
    assert all(f"<title>{one} imports {other}</title>" in drawn.picture() for one, other in drawn.ARROWS)
    assert "](pictures/packages.svg)" in section(ARCHITECTURE, "Packages")


# The recipes


class Obligation(NamedTuple):
    """A requirement for each member of a family.

    Attributes:
        place: the place that the recipe names for it.
        met: whether a member meets it.
    """

    place: str
    met: Callable[[str], bool]


def _row(page: str, heading: str, name: str) -> bool:
    return any(cells[0] == f"`{name}`" and all(cells[:2]) for cells in rows(section(ROOT / "docs" / page, heading)))


def _has_section(cause: str) -> bool:
    section = rf"^## {cause}\n\n\*\*.+\*\*\n\n\*Decided by:\* .+\n\n(- .+\n)*\n?\*Do:\* .+$"
    return re.search(section, text(ROOT / "docs" / "causes.md"), re.M) is not None


@functools.cache
def _programs() -> str:
    return "".join(text(page) for page in sorted((ROOT / "tests" / "diagnosis" / "mechanisms").glob("*.py")))


WITH_OWN_WORDS = {"skip", "warn", "rollback", "lower_lr", "stop", "raise_error"}
"""Actions whose words in the printed line depend on their outcome or on the incident."""

ELSEWHERE = {"unknown": "tests/diagnosis/test_mechanisms.py"}
"""It is the remaining case."""

EARLIER = {"spike"}
"""Causes that only incidents of earlier versions have."""


def _has_program(cause: str) -> bool:
    return cause in EARLIER or f'"{cause}"' in (text(ROOT / ELSEWHERE[cause]) if cause in ELSEWHERE else _programs())


OF_ACTIONS = {
    "public name": Obligation("keras_nanguard/actions.py", lambda name: actions.ACTIONS[name].__name__ in actions.__all__),
    "words": Obligation("_report/console.py::CHANGES", lambda name: name in CHANGES or name in WITH_OWN_WORDS),
    "performer": Obligation("_fit/perform.py::PERFORMERS", lambda name: callable(PERFORMERS[name].perform)),
    "word for what it writes": Obligation("_fit/perform.py::Performer.writes", lambda name: bool(PERFORMERS[name].writes)),
    "row on recovery": Obligation("docs/recovery.md", lambda name: _row("recovery.md", "What each action does", name)),
    "test": Obligation(
        "tests/recovery/test_actions.py",
        lambda name: f"Test{actions.ACTIONS[name].__name__}" in names(ROOT / "tests" / "recovery" / "test_actions.py"),
    ),
}
"""The requirements for each action of `ACTIONS`."""

OF_CAUSES = {
    "advice": Obligation("_core/causes.toml", lambda name: bool(CAUSE_WORDS[name]["do"])),
    "section in the docs": Obligation("docs/causes.md", _has_section),
    "rule, and evidence in a test": Obligation("tests/diagnosis/test_decided.py::CASES", lambda name: name in EARLIER or any(case.cause == name for _, case in CASES.values())),
    "program in a test": Obligation("tests/diagnosis/mechanisms", _has_program),
}
"""The requirements for each cause of `CAUSES`."""


@pytest.mark.parametrize("what", OF_ACTIONS)
@pytest.mark.parametrize("name", actions.ACTIONS)
def test_an_action_has_all_that_its_recipe_names(name, what):
    assert OF_ACTIONS[what].met(name), f"the action {name} has no {what}: {OF_ACTIONS[what].place}"
    assert OF_ACTIONS[what].place in section(CONTRIBUTING, "Add an action")


@pytest.mark.parametrize("what", OF_CAUSES)
@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_has_all_that_its_recipe_names(name, what):
    """It has a rule, words, advice, docs and tests."""
    assert OF_CAUSES[what].met(name), f"the cause {name} has no {what}: {OF_CAUSES[what].place}"
    assert OF_CAUSES[what].place in section(CONTRIBUTING, "Add a cause")


# Who changes what


OWNERS = ("agreement", "counts", "history", "monitors", "recovery", "replay", "ring", "run", "session", "start")
"""Names of the objects with the facts of a run, wherever the package has one of them."""


def changed_from_outside(code: str) -> list[str]:
    """Return what code sets or deletes in one of these objects, outside of the class of the object."""
    changed = []
    for node in ast.walk(ast.parse(code)):
        target = node
        while isinstance(target, ast.Subscript):
            target = target.value
        stores = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) and isinstance(target, ast.Attribute)
        if stores and ast.unparse(target.value).split(".")[-1].lstrip("_") in OWNERS:
            changed.append(ast.unparse(node))
    return changed


@pytest.mark.parametrize("line", ["run.stopped = True", "self._run.counts.step += 1", "run.due[name] = 3", "a, session.start.epochs = 1, 2", "del run.created"])
def test_a_change_from_outside_is_found(line):
    assert changed_from_outside(line)


def test_a_new_run_or_one_of_its_own_attributes_is_no_change_from_outside():
    assert changed_from_outside("self.run = run = Run()\nself.created = guard.session = None\nmodel.stop_training = run.stopped") == []


def test_the_facts_of_a_run_are_changed_by_methods_of_their_owner_only():
    """Elsewhere in the package they are read."""
    assert {path.name: found for path in modules().values() if (found := changed_from_outside(text(path)))} == {}


# The paths of a step


ENTERED = {"healthy": 8, "refused": 54}
"""Maximum number of files that a step enters on TensorFlow, with all helpers."""

RECORDS = (Verdict, Report, Finding, Incident, Diagnosis, Decision, Outcome)
HANDED = {"healthy": 4, "refused": 14}
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
