"""The matrix of versions covers the declared ones; its tests exist, the page shows results."""

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

from campaigns import matrix, short_suite

ROOT = Path(__file__).parents[2]

PAGE = ROOT / "docs" / "compatibility.md"


def settings() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    return found


def rows() -> list[list[str]]:
    """Return the rows of the page: Python, Keras, backend, its version, NumPy, result."""
    lines = [line for line in matrix.pages.read(PAGE, matrix.MARK).splitlines() if line.startswith("| ")]
    return [[part.strip() for part in line.strip("|").split("|")] for line in lines[1:]]


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_the_short_suite_names_tests():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--nightly", "-p", "no:cacheprovider", *short_suite.tests_of("tensorflow")]
    done = subprocess.run(command, cwd=ROOT, env=short_suite.environment_of("tensorflow"), stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:]


def test_cells_cover_each_keras_on_each_backend():
    """So are the lowest declared and the newest version of each backend."""
    cells = [cell for cell in matrix.CELLS if cell.counts]
    assert {cell.python for cell in cells} == {"3.10", "3.11", "3.12", "3.13"}
    kerases = {"3.6", "3.9", "3.12", matrix.NEWEST}
    assert {(cell.keras, cell.backend) for cell in cells} == {(keras, backend) for keras in kerases for backend in matrix.PACKAGES}
    extras = settings()["options.extras_require"]
    for backend in matrix.PACKAGES:
        versions = {cell.version for cell in cells if cell.backend == backend}
        lowest = extras[backend].partition(">=")[2]
        assert {lowest, matrix.NEWEST} <= versions and lowest == min(versions - {matrix.NEWEST}, key=number)


def test_declared_versions_have_run():
    """Each classifier and each lowest version has a row on the page whose suite passed."""
    passed = [row for row in rows() if row[5].startswith("yes")]
    pythons = {row[0].rpartition(".")[0] for row in passed}
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", settings()["metadata"]["classifiers"]))
    keras = re.search(r"^keras>=([\d.]+)$", settings()["options"]["install_requires"], re.MULTILINE)[1]
    assert min(number(row[1]) for row in passed)[:2] == number(keras)
    for backend, requirement in settings()["options.extras_require"].items():
        if backend in matrix.PACKAGES:
            lowest = number(requirement.partition(">=")[2])
            assert min(number(row[3]) for row in passed if row[2] == backend)[: len(lowest)] == lowest


def test_a_nightly_build_does_not_count(tmp_path, monkeypatch):
    """Only released versions of Keras make the command fail; passed cells are not run again."""
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    cells = [cell for cell in matrix.CELLS if cell.backend == "jax" and cell.version == matrix.NEWEST]
    assert [cell.counts for cell in cells] == [cell.keras != "nightly" for cell in cells] and not cells[-1].counts
    ran = []

    def run(group, wheel, whole):
        ran.extend(group)
        return ((cell, matrix.Row({}, "failed", 0, 0, ("broken",), "2026-01-01")) for cell in group)

    monkeypatch.setattr(matrix, "run", run)
    matrix.path_of(cells[0]).write_text(json.dumps(matrix.asdict(matrix.Row({}, "passed", 40, 0, (), "2026-01-01"))))
    assert len(list(matrix.results(cells, tmp_path, False, 0))) == len(cells) and ran == cells[1:]
    assert matrix.known(cells[1]).state == "failed"
