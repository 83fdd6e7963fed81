"""Every cause has its section in the docs."""

import re
from pathlib import Path

from support.public_api import listed

PAGE = Path(__file__).parents[2] / "docs" / "causes.md"


def test_every_cause_has_a_section():
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(sections) == list(listed("cause"))
