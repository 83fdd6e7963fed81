"""The pages by symptom are complete: each has its parts and is listed, and each of the twenty-five questions leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in (DOCS / "howto").glob("*.md") if page.name != "index.md")
PARTS = ["How to see it", "Why", "What to do", "The policy"]


def _links(page: Path) -> list[Path]:
    return [(page.parent / target).resolve() for target in re.findall(r"\]\(([^):#]+\.md)\)", page.read_text(encoding="utf-8"))]


def test_there_are_enough():
    """At least twenty symptoms have a page."""
    assert len(PAGES) >= 22


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_each_page_has_its_parts(page):
    """How to see it with code and what it prints, why, what to do, and what the policy does; short enough to be read."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert [heading for heading in headings if heading in PARTS] == PARTS
    assert re.search(r"^```python\n", text, re.M) and re.search(r"^```text\n", text, re.M)
    shown = re.sub(r"^```text\n.*?^```\n", "", text, flags=re.M | re.S)
    assert len(shown.splitlines()) <= 110


@pytest.mark.parametrize("folder", ["howto", "tutorials"])
def test_the_index_lists_each_page(folder):
    """The page that lists them has all of them, once."""
    index = (DOCS / folder / "index.md").resolve()
    listed = [page for page in _links(index) if page.parent == index.parent]
    assert sorted(listed) == sorted(page for page in index.parent.glob("*.md") if page != index)


def test_each_question_has_a_page_two_clicks_away():
    """Twenty-five questions, each with a page that is there; the page of questions is a click from the front page."""
    rows = re.findall(r"^\| (\d+) \|.*\]\((howto/\w+\.md)\) \|$", (DOCS / "questions.md").read_text(encoding="utf-8"), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    assert all((DOCS / page).is_file() for _, page in rows)
    assert re.search(r"^questions$", (DOCS / "index.md").read_text(encoding="utf-8"), re.M)
