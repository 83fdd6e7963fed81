"""The pages by symptom are listed, show code with its output, and answer the twenty-five common
questions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in (DOCS / "howto").glob("*.md") if page.name != "index.md")


def _links(page: Path) -> list[Path]:
    return [(page.parent / target).resolve() for target in re.findall(r"\]\(([^):#]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_each_page_shows_how_to_see_it(page):
    """A symptom is shown by code that runs, with its output."""
    assert re.search(r"^```python\n.*?^```\n\n```text\n", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("folder", ["howto", "tutorials"])
def test_the_index_lists_each_page(folder):
    """The index lists all pages."""
    index = (DOCS / folder / "index.md").resolve()
    listed = {page for page in _links(index) if page.parent == index.parent}
    assert listed == {page for page in index.parent.glob("*.md") if page != index}


def test_each_question_has_a_page_two_clicks_away():
    """Each of twenty-five questions has a link to a page, one click from the front page."""
    index = DOCS / "howto" / "index.md"
    rows = re.findall(r"^\| (\d+) \| .* \| \[.*\]\(([^)#]+\.md)(?:#[^)]*)?\) \|$", index.read_text(encoding="utf-8"), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    assert all((index.parent / page).is_file() for _, page in rows)
    assert index.resolve() in _links(DOCS / "index.md")
