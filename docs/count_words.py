"""Count the words of the documentation, without code blocks and comments.

    python docs/count_words.py

A word is a text between spaces with a letter or a digit. CONTRIBUTING.md has the limit of the sum.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
CODE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^ *\2 *$", re.M | re.S)


def words(text: str) -> int:
    """Return the number of words of a page."""
    prose = re.sub(r"<!--.*?-->", "", CODE.sub("", text), flags=re.S)
    return sum(any(letter.isalnum() for letter in word) for word in prose.split())


def counts() -> dict[Path, int]:
    """Return the words of each page."""
    pages = [*FIRST, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
    return {page: words(page.read_text(encoding="utf-8")) for page in pages}


if __name__ == "__main__":
    found = counts()
    for page, number in sorted(found.items(), key=lambda pair: pair[1]):
        print(f"{number:6,}  {page.relative_to(ROOT)}")
    print(f"{sum(found.values()):6,}  in all")
