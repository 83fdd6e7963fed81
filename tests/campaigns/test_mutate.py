"""The surviving mutants are explained, their code exists, and a mistake is detected."""

import ast
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from campaigns import mutant_runs, mutate, pages
from campaigns.equivalent_mutants import EXPLAINED
from campaigns.mutants import PACKAGE, Mutant, function_at, replaced
from keras_nanguard import Finding

PAGE = PACKAGE.parent / "campaigns" / "results" / "mutate.md"


def mutant(module: str, before: str, after: str) -> Mutant:
    """Return the mutant of a module with one piece of its code replaced."""
    source = (PACKAGE / module).read_text("utf-8")
    assert source.count(before) == 1, f"{module} has no such code, or has it twice: {before}"
    start = source.index(before)
    line = source.count("\n", 0, start) + 1
    return Mutant(module, function_at(ast.parse(source), line), "by hand", line, before, after, 0, start, start + len(before), after)


def test_a_mistake_is_noticed():
    """A test that passes on the code fails on the mutant, and passes again afterwards."""

    def counts_entries():
        assert str(Finding("loss", nan=1, inf=0, size=2)) == "loss: 1 NaN of 2"

    counts_entries()
    assert mutant_runs.notices(mutant("_core/incident.py", "self.size > 1", "self.size > 2"), counts_entries)
    counts_entries()


def test_only_functions_are_swapped():
    for before, after in (("MIN_LOSS_SCALE = 2.0**-14", "MIN_LOSS_SCALE = 2.0**-15"), ("SCALE_DOWN, SUM_LIMIT = 2.0**-100", "SCALE_DOWN, SUM_LIMIT = 2.0**-99")):
        assert mutant_runs.swapped(mutant("_backends/shared/rules.py", before, after)) is None


@pytest.mark.parametrize("one", EXPLAINED, ids=lambda one: f"{one.function}: {one.before[:40]}")
def test_an_explained_survivor_names_code_that_exists(one):
    source = (PACKAGE / one.module).read_text("utf-8")
    lines = [line.strip() for line in source.splitlines()]
    first = one.before.splitlines()[0]
    found = [number + 1 for number, line in enumerate(lines) if line == first]
    assert one.function in {function_at(ast.parse(source), number) for number in found}
    assert one.before not in one.after and one.why.strip().endswith(".")


def test_no_two_explanations_are_of_one_mutant():
    known = [(one.module, one.function, one.before, after) for one in EXPLAINED for after in one.after or ("",)]
    assert len(known) == len(set(known))


def test_the_page_has_the_modules_and_no_survivor_of_the_rules_that_is_not_explained():
    rows = {cells[0]: cells[1:] for cells in pages.rows(pages.read(PAGE, "mutate"))}
    assert [*rows] == [*(f"`{module}`" for group in mutate.GROUPS.values() for module in group.modules), "all"]
    for module in mutate.GROUPS["rules"].modules:
        mutants, run, *_, survived, _ = rows[f"`{module}`"]
        assert (int(run), int(survived)) == (int(mutants), 0), module


@given(st.text("ab\n"), st.text("ab\n"), st.text("ab\n"), st.text("ab\n"))
def test_a_difference_makes_one_text_of_the_other(head, one, other, tail):
    from campaigns.mutants import _difference

    before, after = head + one + tail, head + other + tail
    assert replaced(before, *_difference(before, after)) == after


def test_the_latest_result_counts(tmp_path):
    """A mutant that ran again is counted once; one that was selected is selected again."""
    for outcome in ("survived", "killed"):
        with (tmp_path / "rules.results").open("a") as file:
            file.write(json.dumps({"key": "k", "outcome": outcome}) + "\n")
    assert [found["outcome"] for found in mutate.results("rules", tmp_path).values()] == ["killed"]
    many = [mutant("_core/verdict.py", "PERIOD = 1", f"PERIOD = {number}") for number in range(2, 20)]
    assert mutate.drawn(many, 5) == mutate.drawn(many, 5) and len(mutate.drawn(many, 5)) == 5
    assert set(mutate.drawn(many, 0)) == set(many) > set(mutate.drawn(many, 5)) == {*mutate.drawn(many[::-1], 5)}


def test_tests_that_cannot_be_collected_notice_nothing(tmp_path):
    session = SimpleNamespace(testsfailed=1, items=[], Interrupted=pytest.Session.Interrupted)
    with pytest.raises(pytest.Session.Interrupted, match="1 errors in collecting"):
        mutant_runs.Runs((), (), tmp_path, "none", 1.0).pytest_runtestloop(session)
