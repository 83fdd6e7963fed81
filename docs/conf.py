"""How Sphinx builds the site: `make docs`. Needs no network; every warning is an error."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
for _name, _value in {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}.items():
    os.environ.setdefault(_name, _value)

import example_pages  # noqa: E402

from keras_nanguard import __version__  # noqa: E402

project = "keras_nanguard"
author = "the contributors of keras_nanguard"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page on GitHub may go from # to ###

html_theme = "furo"
html_title = "keras_nanguard"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
html_permalinks_icon = "#"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "literal"  # as in docstrings of Keras, `name` is code
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!keras_nanguard\.).*"),  # no links to the docs of Python, NumPy and Keras, which would need a network
    ("py:.*", r".*\.(Arguments|Returned)"),  # type variables
    ("py:class", r"keras_nanguard\._policy\.(policy\.Sections|actions\.Action)"),  # described by the page on policy fields
]

FENCE = re.compile(r"^(\s*)```(\w*)\s*$")
OUTSIDE = {"../CONTRIBUTING.md": "contributing.md", "../README.md": "index.md", "../SECURITY.md": "security.md"}


def _with_fences(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with fences around code that is only indented below `Example:`."""
    text = "\n".join(lines) + "\n"
    indented = re.compile(r"^Example:\n\n?((?: {4}(?!```|>>>).*\n|\n(?= {4}))+)", re.M)
    return indented.sub(lambda found: f"Example:\n\n```python\n{textwrap.dedent(found[1])}```\n", text).split("\n")


def _fences_to_directives(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the fenced blocks of docstrings into directives of reStructuredText."""
    made, inside = [], False
    for line in _with_fences(lines):
        fence = FENCE.match(line)
        if fence and not inside:
            made += ["", f"{fence[1]}.. code-block:: {fence[2] or 'text'}", ""]
        elif fence:
            made.append("")
        else:
            made.append(f"    {line}" if inside and line else line)
        inside = inside != bool(fence)
    lines[:] = made
    if what == "property" and lines:  # napoleon treats text before a colon as the type
        lines[0] = lines[0].replace(": ", " -- ")


def _links_of_the_repository(app: Any, name: str, source: list[str]) -> None:
    """Make links that leave docs/ point to pages of the site. Links to code become plain names."""
    text = source[0]
    for path in (*example_pages.SCRIPTS, *example_pages.NOTEBOOKS):
        target = "../" * name.count("/") + example_pages.page_of(path.name)
        text = re.sub(rf"\]\((?:\.\./)+examples/{re.escape(path.name)}\)", f"]({target})", text)
    for target, page in OUTSIDE.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(target)}", f"]({'../' * name.count('/')}{page}", text)
    text = re.sub(r"\[(`[^`\]]+`)\]\((?:\.\./)+(?:keras_nanguard|tests|examples|benchmarks|campaigns)[^)]*\)", r"\1", text)
    text = re.sub(r"\[([^`\]]+)\]\((?:\.\./)+((?:keras_nanguard|tests|examples|benchmarks|campaigns)[^)]*)\)", r"\1 (`\2`)", text)
    source[0] = text


def _examples(app: Any, name: str, source: list[str]) -> None:
    """Append the sources of the examples to their pages."""
    if name in example_pages.PAGES:
        source[0] += "\n" + example_pages.PAGES[name]()


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _fences_to_directives, priority=400)  # before napoleon
    app.connect("source-read", _links_of_the_repository)
    app.connect("source-read", _examples)
