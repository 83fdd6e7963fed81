"""Every link of the docs has a target, every public name exists. tests/docs runs their code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
REPOSITORY = r"https://(?:github|raw\.githubusercontent)\.com/keras-nanguard/keras-nanguard/(?:blob/)?main/"
PAGES = [*FIRST, *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_the_repository_name_files(page):
    """A link by the address of the repository, as PyPI needs, names a file and its heading."""
    for target, anchor in re.findall(rf"{REPOSITORY}([^)#]+)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        assert (ROOT / target).is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(ROOT / target), f"{page.name} links to {target}#{anchor}"


def test_the_readme_has_no_relative_links():
    """PyPI shows the README without the other files."""
    assert re.findall(r"\]\((?!https?:)[^)]*\)", FIRST[0].read_text(encoding="utf-8")) == []


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
