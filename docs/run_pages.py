"""Run the Python blocks of documentation pages, and write or compare what they print.

    python docs/run_pages.py docs/howto/*.md            compare
    python docs/run_pages.py --write docs/howto/*.md    write the output into the pages

The blocks fenced ```python of one page run in order in one fresh namespace, in an empty directory. A block fenced ```text directly after
one of them has its output. Five comments are recognized:

    <!-- run first: CODE -->       runs at this place; neither code nor output is shown
    <!-- not run: REASON -->       before a block fenced ```py, which does not run
    <!-- backend: jax -->          the page runs on that backend; otherwise on TensorFlow
    <!-- run by: tests/... -->     the blocks of this page are run by another test
    <!-- rounded: 0.2 REASON -->   numbers other than counts may differ by this share (and by a tenth of it absolutely)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)")
TOLERANCE = 0.01
"""Share by which numbers other than counts may differ, unless the page sets another one."""

EXACT_UP_TO = 10_000
"""Whole numbers up to this are steps, rows and counts. They must be equal."""

ANY_LINES = "..."
"""A line of this in the page matches any lines of the output."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page, and the block after it with its output."""

    code: str
    line: int
    """The line of the page in which the code begins, counted from 1."""

    hidden: bool = False
    expected: str | None = None
    output_lines: tuple[int, int] | None = None
    """The lines of the content of the output block, as a slice."""

    indent: str = ""


def parsed(text: str) -> Iterator[Any]:
    """Yield the tokens of a page that may be code, output or a comment."""
    for token in MarkdownIt("commonmark").parse(text):
        if not token.type.endswith("_close"):
            yield token


def comment(token: Any, name: str) -> str | None:
    """Return the content of a comment of the given name, or `None`."""
    found = re.match(rf"\s*<!--\s*{name}:(.*?)-->", token.content, re.S) if token.type == "html_block" else None
    return found.group(1).strip() if found else None


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page that run, in order."""
    lines = text.splitlines()
    tokens = list(parsed(text))
    found = []
    for place, token in enumerate(tokens):
        hidden = comment(token, "run first")
        if hidden is not None:
            found.append(Block(hidden, token.map[0] + 1, hidden=True))
        elif token.type == "fence" and token.info.strip() == "python":
            after = tokens[place + 1] if place + 1 < len(tokens) else None
            shown = after is not None and after.type == "fence" and after.info.strip() == "text"
            first = lines[token.map[0]]
            found.append(
                Block(
                    token.content,
                    token.map[0] + 2,
                    expected=after.content if shown else None,
                    output_lines=(after.map[0] + 1, after.map[1] - 1) if shown else None,
                    indent=first[: len(first) - len(first.lstrip())],
                )
            )
    return found


def declared(text: str, name: str) -> str | None:
    """Return a setting of the page from a comment, such as its backend."""
    return next((value for token in parsed(text) if (value := comment(token, name)) is not None), None)


def backend_of(text: str) -> str | None:
    """Return the backend on which a page runs; `None` if no block of it runs here."""
    if declared(text, "run by") is not None or not blocks(text):
        return None
    return declared(text, "backend") or "tensorflow"


def without_reason(text: str) -> list[int]:
    """Return the lines of the blocks that do not run and have no reason."""
    tokens = list(parsed(text))
    pairs = zip([None, *tokens], tokens)
    is_py = (pair for pair in pairs if pair[1].type == "fence" and pair[1].info.strip() == "py")
    return [token.map[0] + 1 for before, token in is_py if before is None or not comment(before, "not run")]


def run(path: Path) -> list[tuple[Block, str]]:
    """Run a page in an empty directory, and return each block with its output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    results = []
    home = Path.cwd()
    page = path.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _fresh()
            for block in blocks(page.read_text(encoding="utf-8")):
                printed = io.StringIO()
                # Lines of the page in a traceback are those of the file.
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                with contextlib.redirect_stdout(printed):
                    exec(code, names)
                results.append((block, tidied(printed.getvalue(), folder, str(page.parent))))
        finally:
            os.chdir(home)
            _fresh()
    return results


def _fresh() -> None:
    """Reset the global settings of Keras that the previous page has changed."""
    import keras

    keras.config.set_dtype_policy("float32")
    keras.config.enable_traceback_filtering()
    keras.backend.clear_session(free_memory=False)


def tidied(output: str, *folders: str) -> str:
    """Return an output without local folders, and without spaces at the ends of lines."""
    for folder in folders:
        output = output.replace(os.path.realpath(folder) + os.sep, "").replace(folder + os.sep, "")
    return "".join(line.rstrip() + "\n" for line in output.splitlines())


def tolerance_of(text: str) -> float:
    """Return the share by which numbers of a page other than counts may differ, because processors round differently."""
    return float((declared(text, "rounded") or str(TOLERANCE)).split()[0])


def same(expected: str, printed: str, tolerance: float = TOLERANCE) -> bool:
    """Return whether two outputs are the same, with some tolerance for numbers that are not counts."""
    return _lines_match(expected.rstrip().splitlines(), printed.rstrip().splitlines(), tolerance)


def _lines_match(expected: list[str], printed: list[str], tolerance: float) -> bool:
    if not expected:
        return not printed
    if expected[0].strip() == ANY_LINES:
        return any(_lines_match(expected[1:], printed[start:], tolerance) for start in range(len(printed) + 1))
    return bool(printed) and _line_matches(expected[0], printed[0], tolerance) and _lines_match(expected[1:], printed[1:], tolerance)


def _line_matches(expected: str, printed: str, tolerance: float) -> bool:
    if expected.rstrip() == printed.rstrip():
        return True
    # A number may take one more character, so the spaces before it do not count.
    texts = [re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() for line in (expected, printed)]
    numbers = zip(NUMBER.findall(expected), NUMBER.findall(printed))
    return texts[0] == texts[1] and all(_close(one, other, tolerance) for one, other in numbers)


def _close(one: str, other: str, tolerance: float) -> bool:
    a, b = (float(number.replace(",", "")) for number in (one, other))
    counts = all(re.fullmatch(r"[-+]?\d+", number) and abs(float(number)) <= EXACT_UP_TO for number in (one, other))
    least = 1e-6 if tolerance == TOLERANCE else tolerance / 10  # a mean near 0, say
    return a == b if counts else math.isclose(a, b, rel_tol=tolerance, abs_tol=least)


def problems(path: Path) -> list[str]:
    """Run a page and return the differences between its output and the page."""
    found, tolerance = [], tolerance_of(path.read_text(encoding="utf-8"))
    for block, printed in run(path):
        if block.expected is not None and not same(block.expected, printed, tolerance):
            found.append(f"{path}:{block.line}: shows\n{block.expected}\nbut printed\n{printed}")
    return found


def written(text: str, results: Sequence[tuple[Block, str]]) -> str:
    """Return a page with the output of its blocks. Output within the tolerance does not change."""
    lines, tolerance = text.splitlines(), tolerance_of(text)
    for block, printed in reversed(results):
        if block.output_lines and block.expected is not None and not same(block.expected, printed, tolerance):
            first, last = block.output_lines
            lines[first:last] = [(block.indent + line).rstrip() for line in printed.splitlines()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the output into the pages")
    parser.add_argument("--alone", action="store_true", help="run pages that say that another test runs them, too")
    options = parser.parse_args(arguments)
    wrong = 0
    here = os.environ.get("KERAS_BACKEND", "tensorflow")
    for path in options.pages:
        text = path.read_text(encoding="utf-8")
        if backend_of(text) != here and not options.alone:
            print(f"{path}: nothing runs on {here}")
        elif options.write:
            path.write_text(written(text, run(path)), encoding="utf-8")
            print(f"{path}: written")
        else:
            found = problems(path)
            wrong += len(found)
            print(*found or [f"{path}: as shown"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    for name, value in {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}.items():
        os.environ.setdefault(name, value)
    sys.exit(main())
