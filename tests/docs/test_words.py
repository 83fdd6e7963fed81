"""The documentation stays short."""

from __future__ import annotations

from support.docs_tools import load

count_words = load("count_words")

LIMIT = 35_000
"""Words of all pages together, without their code."""


def test_all_pages_together_stay_below_the_limit():
    """A new page has to replace other text."""
    assert sum(count_words.counts().values()) <= LIMIT
