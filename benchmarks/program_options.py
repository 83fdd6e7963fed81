"""The command line of the benchmarks over a table of programs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

__all__ = ["Options"]


class Options:
    """The options of the command line, and the output of the measured rows.

    Args:
        doc: the text of `--help`.
        programs: the table; each program has a `name`.
    """

    def __init__(self, doc: str | None, programs: Sequence[Any]):
        self._programs, self._started = programs, time.perf_counter()
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("names", nargs="*", help="programs, all by default")
        self.parser.add_argument("--json", type=Path, help="file for the rows")
        self.parser.add_argument("--check", action="store_true", help="exit with 1 on a failure")

    def read(self) -> tuple[argparse.Namespace, list[Any]]:
        """Return the options and the chosen programs; an unknown name is an error."""
        options = self.parser.parse_args()
        unknown = set(options.names) - {program.name for program in self._programs}
        if unknown:
            self.parser.error(f"no programs: {', '.join(sorted(unknown))}")
        names = options.names
        return options, [p for p in self._programs if not names or p.name in names]

    def end(self, rows: Sequence[dict[str, Any]], path: Path | None) -> None:
        """Print backend and time, and write the rows as JSON."""
        print(f"{keras.backend.backend()}, {time.perf_counter() - self._started:.0f} s")
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))
