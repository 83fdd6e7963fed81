"""Incidents in files: written by a guard, read back by the command line. Data only; nothing in a file can run code."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_nanguard._errors import GuardError, expected
from keras_nanguard._incident import FORMAT, Incident
from keras_nanguard.reports import console

__all__ = ["read", "write"]

LARGEST = 256 << 20
"""Bytes of the largest file that is read."""


def write(incidents: Sequence[Incident], head: str, path: str | os.PathLike[str]) -> Path:
    """Write incidents to a file and return its path; it is written beside and renamed, so it is never half there.

    Args:
        incidents: what to write.
        head: a few lines that stand before the incidents in a text for people.
        path: ends in `.json` (one object with a format number), `.jsonl` (one incident a line), `.md` or `.html`.

    Raises:
        GuardError: for another ending.
    """
    path = Path(path)
    texts: dict[str, Callable[[], str]] = {
        ".json": lambda: json.dumps({"format": FORMAT, "incidents": [i.to_dict() for i in incidents]}, indent=2),
        ".jsonl": lambda: "".join(i.to_json() + "\n" for i in incidents),
        ".md": lambda: console.markdown(incidents, head),
        ".html": lambda: _html(console.markdown(incidents, head)),
    }
    if path.suffix not in texts:
        raise GuardError(expected("a path that ends in .json, .jsonl, .md or .html", f"path={str(path)!r}", "Choose one of them."))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(texts[path.suffix](), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _html(text: str) -> str:
    from rich.console import Console
    from rich.markdown import Markdown

    page = Console(record=True, file=io.StringIO(), width=110)
    page.print(Markdown(text))
    return page.export_html()


def read(path: str | os.PathLike[str]) -> list[Incident]:
    """Read incidents from a `.json` or `.jsonl` file of `write`, from a bundle, or from a folder of bundles.

    Raises:
        GuardError: if there is no such file, or it holds something else.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in (path / "incident.json", *path.glob("*/incident.json")) if p.is_file())
        if not files:
            raise GuardError(expected("a folder with bundles in it", f"{str(path)!r}, which has none", _REMEDY))
        return sorted((_incident(_document(_text(file), file), file) for file in files), key=lambda i: i.step)
    text = _text(path)
    if path.suffix == ".jsonl":
        return [_incident(_document(line, path), path) for line in text.splitlines() if line.strip()]
    document = _document(text, path)
    if isinstance(document, dict) and isinstance(document.get("incidents"), list):
        return [_incident(entry, path) for entry in document["incidents"]]
    return [_incident(document, path)]


_REMEDY = "Pass a .json or .jsonl file that guard.report(path) wrote, or the directory that was given to NanGuard."


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise GuardError(expected(f"a file of at most {LARGEST} bytes", f"{str(path)!r}, which is larger", _REMEDY))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GuardError(expected("a readable report", f"{str(path)!r}: {error}", _REMEDY)) from error


def _document(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GuardError(expected("JSON", f"{str(path)!r}: {error}", _REMEDY)) from error


def _incident(data: Any, path: Path) -> Incident:
    try:
        return Incident.from_dict(data)
    except GuardError as error:
        raise GuardError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise GuardError(expected("an incident", f"{str(path)!r}: {error}", _REMEDY)) from error
