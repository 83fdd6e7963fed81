"""The documentation stays short."""

from __future__ import annotations

from support.docs_tools import load

count_words = load("count_words")

LIMIT = 35_000
"""Words of all pages together, without their code."""


def test_all_pages_together_stay_below_the_limit():
    """A new page has to replace other text."""
    assert sum(count_words.counts().values()) <= LIMIT


def test_code_and_comments_do_not_count():
    """Only visible words count; the bars of a table are not words."""
    page = "# Two words\n\n<!-- a comment -->\n\n```python\nx = 1\n```\n\n| one | two |\n|---|---|\n"
    assert count_words.words(page) == 4
