"""The versions that the library works with: runs the short suite on each, and writes a table.

    python campaigns/matrix.py --write docs/compatibility.md
    python campaigns/matrix.py --only "3.13.*jax" --fresh
    python campaigns/matrix.py --only "keras 3.6.*tensorflow 2.16" --whole 3

A cell is a Python, a Keras, and a version of a backend. `CELLS` covers each Python, each Keras on
each backend, and the lowest and the newest version of each backend that each Keras supports. Cells
that differ only in Keras share a temporary environment, created by uv (`make .venv-release/.ready`
installs it). The library is built as a wheel and installed from it, and the short suite
(`campaigns/short_suite.py`) runs on it. If it fails, a program without a guard is tried: if that
also fails, the versions are incompatible, and the cell states this.

Results are in `out/matrix`, one file for each cell, so an interrupted run continues: cells that
have passed are not run again, except with `--fresh`. Exits with 1 if a cell failed. The nightly
build of Keras is shown and does not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns import environments, pages, short_suite

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "out" / "matrix"
MARK = "matrix"

PACKAGES = {"tensorflow": "tensorflow-cpu", "jax": "jax", "torch": "torch"}
NEWEST = "newest"

SHOWN = 2
"""Number of failures of a cell that are listed below the table."""


@dataclass(frozen=True)
class Cell:
    """Versions to run the short suite on.

    Attributes:
        python: such as `3.12`.
        keras: such as `3.9`, `newest` or `nightly`.
        backend: `tensorflow`, `jax` or `torch`.
        version: of the backend, such as `2.16`, or `newest`.
        more: other requirements, if the newest release of a package is incompatible with an old
            backend.
    """

    python: str
    keras: str
    backend: str
    version: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Identifies the cell."""
        return f"python {self.python}, keras {self.keras}, {self.backend} {self.version}"

    @property
    def counts(self) -> bool:
        """Whether a failure makes the command fail."""
        return self.keras != "nightly"

    @property
    def requirements(self) -> list[str]:
        """The packages that are installed with the library."""
        keras = "keras" if self.keras == "nightly" else _pinned("keras", self.keras)
        return [keras, _pinned(PACKAGES[self.backend], self.version), *self.more]


def _pinned(package: str, version: str) -> str:
    return package if version == NEWEST else f"{package}=={version}.*"


OF_ITS_TIME = ("numpy<2.3",)
"""Versions that are compatible with backends of 2024."""

CELLS = (
    Cell("3.10", "3.6", "tensorflow", "2.16"),
    Cell("3.11", NEWEST, "tensorflow", "2.16"),
    Cell("3.12", "3.9", "tensorflow", "2.17"),
    Cell("3.11", "3.12", "tensorflow", "2.18"),
    Cell("3.12", NEWEST, "tensorflow", "2.19"),
    Cell("3.13", "3.12", "tensorflow", "2.20"),
    *(Cell("3.13", keras, "tensorflow", NEWEST) for keras in (NEWEST, "nightly")),
    *(Cell("3.10", keras, "jax", "0.4.38", OF_ITS_TIME) for keras in ("3.6", "3.9", "3.12")),
    Cell("3.11", NEWEST, "jax", "0.4.38", OF_ITS_TIME),
    *(Cell("3.12", keras, "jax", "0.6.0") for keras in ("3.6", "3.9")),
    *(Cell("3.13", keras, "jax", NEWEST) for keras in ("3.12", NEWEST, "nightly")),
    *(Cell("3.10", keras, "torch", "2.3", OF_ITS_TIME) for keras in ("3.6", "3.9", "3.12")),
    Cell("3.11", NEWEST, "torch", "2.3", OF_ITS_TIME),
    *(Cell("3.13", keras, "torch", NEWEST) for keras in ("3.6", "3.9", "3.12", NEWEST, "nightly")),
)
"""JAX 0.6.0 is the newest version that Keras 3.6 and 3.9 support."""

PLAIN = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(64, 8, 8, 1)).astype("float32")
y = (np.arange(64) % 3).astype("int32")
layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, verbose=0)
model.predict(x, verbose=0)
model.save("plain.keras")
keras.saving.load_model("plain.keras")
"""
"""A program without a guard, which tests whether Keras, the backend and NumPy are compatible."""


@dataclass(frozen=True)
class Row:
    """The result of a cell.

    Attributes:
        versions: the installed version of each package.
        state: `passed`, `failed`, `not together` (Keras itself does not run) or `not installed`.
        passed, skipped: numbers of tests.
        failures: the failures, or why nothing ran.
        date: when.
    """

    versions: dict[str, str]
    state: str
    passed: int
    skipped: int
    failures: tuple[str, ...]
    date: str


def run(cells: Sequence[Cell], wheel: Path, whole: int = 0) -> Iterator[tuple[Cell, Row]]:
    """Run the short suite in cells that differ only in Keras, in one environment.

    Args:
        cells: the cells.
        wheel: the library.
        whole: run all tests instead, in this many processes.
    """
    first, left = cells[0], list(cells)
    try:
        with environments.fresh(first.python) as python:
            wanted = f"{wheel}[dev]" if whole else str(wheel)
            environments.install(python, [wanted, *first.requirements, *short_suite.NEEDS])
            while left:
                yield left[0], _run_in(left[0], python, whole)
                del left[0]
    except environments.InstallError as error:
        yield from ((cell, _row({}, "not installed", failures=(str(error),))) for cell in left)


def _run_in(cell: Cell, python: Path, whole: int) -> Row:
    """Install the Keras of a cell in an environment, and run the tests there."""
    try:
        _install_keras(cell, python)
    except environments.InstallError as error:
        return _row({}, "not installed", failures=(str(error),))
    keras = "keras-nightly" if cell.keras == "nightly" else "keras"
    found = environments.versions(python, [keras, PACKAGES[cell.backend], "numpy"])
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        if whole:
            words = ("tests", "-m", "not slow", "-n", str(whole), "--dist", "worksteal")
            result = short_suite.run(python, cell.backend, ROOT, tests=words, limit=7200)
        else:
            result = short_suite.run(python, cell.backend, Path(folder))
        why = "" if result.good else _plain(python, cell.backend, folder)
    if why:
        return _row(found, "not together", failures=(why,))
    return _row(found, "passed" if result.good else "failed", result.passed, result.skipped, result.failures)


def _install_keras(cell: Cell, python: Path) -> None:
    if cell.keras == "nightly":  # another distribution of the same package
        environments.uninstall(python, "keras")
        environments.install(python, ["keras-nightly"], "--prerelease", "allow", "--no-deps")
    else:
        environments.install(python, cell.requirements, "--upgrade-package", "keras")


def _plain(python: Path, backend: str, folder: str) -> str:
    """Return why a program without a guard fails, `""` if it does not."""
    done = subprocess.run(
        [str(python), "-c", PLAIN], cwd=folder, env=short_suite.environment_of(backend),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )
    return done.stdout.strip().splitlines()[-1][:300] if done.returncode else ""


def _row(versions: dict[str, str], state: str, passed: int = 0, skipped: int = 0, failures: tuple[str, ...] = ()) -> Row:
    return Row(versions, state, passed, skipped, failures, time.strftime("%Y-%m-%d"))


def path_of(cell: Cell) -> Path:
    """Return the file of a cell's result."""
    return RESULTS / f"{cell.name.replace(', ', '_').replace(' ', '-')}.json"


def known(cell: Cell) -> Row | None:
    """Return the result of a cell, `None` if it was not run."""
    path = path_of(cell)
    if not path.exists():
        return None
    data = json.loads(path.read_text("utf-8"))
    return Row(**{**data, "failures": tuple(data["failures"])})


def table(cells: Sequence[Cell] = CELLS) -> str:
    """Return the table as Markdown, followed by the failures."""
    lines = ["| Python | Keras | backend | | NumPy | short suite |", "|---|---|---|---|---|---|"]
    notes = []
    for cell in cells:
        row = known(cell)
        if row is None:
            lines.append(f"| {cell.python} | {cell.keras} | {cell.backend} | {cell.version} | | not run |")
            continue
        found = {**dict.fromkeys(("python", "numpy"), ""), "python": cell.python, **row.versions}
        keras = found.get("keras") or found.get("keras-nightly") or cell.keras
        backend = found.get(PACKAGES[cell.backend], cell.version).partition("+")[0]
        lines.append(f"| {found['python']} | {keras} | {cell.backend} | {backend} | {found['numpy']} | {verdict(row)} |")
        notes += _notes(cell, row)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _notes(cell: Cell, row: Row) -> list[str]:
    """Return the first failures in a cell."""
    shown = [failure.replace("`", "'") for failure in row.failures[:SHOWN]]
    more = [f"- {cell.name}: {len(row.failures) - SHOWN} more"] if len(row.failures) > SHOWN else []
    return [*(f"- {cell.name}: `{failure}`" for failure in shown), *more]


def verdict(row: Row) -> str:
    """Return the entry of a cell in the table."""
    if row.state == "passed":
        return f"yes, {row.passed} tests"
    if row.state == "failed" and row.passed:
        return f"no: {len(row.failures)} of {row.passed + len(row.failures)} tests failed"
    return {"not together": "Keras does not run on it", "not installed": "does not install", "failed": "no: it did not run"}[row.state]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, help="page whose table is replaced, after each cell")
    parser.add_argument("--only", default="", help="run the cells whose names match this pattern, such as 'keras 3.6.*jax'")
    parser.add_argument("--wheel", type=Path, help="the wheel to install; built from this tree by default")
    parser.add_argument("--fresh", action="store_true", help="also run cells with a result")
    parser.add_argument("--whole", type=int, default=0, metavar="WORKERS", help="run all tests, in this many processes; writes no result")
    given = parser.parse_args()
    cells = [cell for cell in CELLS if re.search(given.only, cell.name)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        wheel = given.wheel or _built(Path(folder))
        for cell, row in results(cells, wheel, given.fresh, given.whole):
            bad += row.state != "passed" and cell.counts
            print(f"{cell.name}: {verdict(row)}", *row.failures, sep="\n  ", flush=True)
            if given.write is not None and not given.whole:
                pages.write(given.write, MARK, table())
    return int(bad > 0)


def _built(folder: Path) -> Path:
    """Build the wheel from the sdist, so that it contains no stale files."""
    environments.uv("build", "--quiet", "--python", sys.executable, "--out-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def results(cells: Sequence[Cell], wheel: Path, fresh: bool, whole: int) -> Iterator[tuple[Cell, Row]]:
    """Yield the result of each cell, from this or an earlier run."""
    due = [cell for cell in cells if fresh or whole or (row := known(cell)) is None or row.state != "passed"]
    yield from ((cell, row) for cell in cells if cell not in due and (row := known(cell)) is not None)
    for _, group in itertools.groupby(due, lambda cell: (cell.python, cell.backend, cell.version)):
        for cell, row in run(list(group), wheel, whole):
            if not whole:
                path_of(cell).write_text(json.dumps(asdict(row), indent=1), "utf-8")
            yield cell, row


if __name__ == "__main__":
    raise SystemExit(main())
