"""The sources of the examples as parts of the site: `docs/conf.py` appends them to their pages.

    python docs/example_pages.py examples_sources    print the text that is appended to docs/examples_sources.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = [*sorted(FOLDER.glob("*.py")), *sorted(FOLDER.glob("*.toml"))]
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences for colours and weights."""


def page_of(file: str) -> str:
    """Return the page and the anchor under which the site has an example."""
    page = "notebooks.md" if file.endswith(".ipynb") else "examples_sources.md"
    return f"{page}#{file.replace('.', '')}"


def sources() -> str:
    """Return each script and policy file as a section with its whole text."""
    language = {".py": "python", ".toml": "toml"}
    sections = (f"## {path.name}\n\n````{language[path.suffix]}\n{path.read_text(encoding='utf-8')}````\n" for path in SCRIPTS)
    return "\n".join(sections)


def notebooks() -> str:
    """Return each notebook as a section: its texts, its code, and its output."""
    return "\n".join(f"## {path.name}\n\n" + "\n\n".join(_cells(path)) + "\n" for path in NOTEBOOKS)


def _cells(path: Path) -> Iterator[str]:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            linked = re.sub(r"\]\((\w+)\.ipynb\)", r"](#\1ipynb)", source)
            yield re.sub(r"^#+ ", "### ", linked, flags=re.M)
        elif source.strip():
            yield f"````python\n{source}\n````"
            yield from map(_output, cell["outputs"])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        encoded = "".join(data["image/png"]).replace("\n", "")
        return f'<p><img alt="The figure that this code draws" src="data:image/png;base64,{encoded}"></p>'
    text = ESCAPES.sub("", "".join(output.get("text", data.get("text/plain", ""))))
    return f"````text\n{text.rstrip()}\n````"


PAGES = {"examples_sources": sources, "notebooks": notebooks}
"""The text that is appended to each page."""


if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
