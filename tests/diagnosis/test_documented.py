"""Every cause has its section in the docs, and every policy can match on it."""

import re
from pathlib import Path

from keras_nanguard._core.incident import CAUSES

PAGE = Path(__file__).parents[2] / "docs" / "causes.md"


def test_every_cause_has_a_section_in_order():
    assert tuple(re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.M)) == CAUSES
