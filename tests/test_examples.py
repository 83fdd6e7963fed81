"""Every example runs, shows the benefit of the guard, and prints what docs/examples.md shows."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import keras  # noqa: F401  what is set in an example is set back where Keras is loaded
import pytest
from support import docs_tools

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "examples.md"
BACKEND = os.environ["KERAS_BACKEND"]

ON = {"own_loop_jax.py": "jax", "two_processes.py": "jax", "own_loop_torch.py": "torch"}
"""Examples for one backend; all others run on TensorFlow."""

ALONE = {"two_replicas.py", "corrupt_data.py"}
"""They need a separate process: virtual devices before TensorFlow starts, XLA as users have it."""

NOT_RUN = {"pictures.py"}
"""Creates the pictures of a report, with a browser."""

SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in NOT_RUN)
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
tidied = docs_tools.load("run_pages").tidied
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")


def table() -> dict[str, list[str]]:
    rows = re.findall(r"^\| \[`?([\w.]+)`?\]\(\.\./examples/\1\) \| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name: re.findall(r"`([^`]+)`", printed) for name, printed in rows}


def agrees(one: str, other: str) -> bool:
    """Whether two lines are the same, numbers within 5 %, because processors round differently."""
    if NUMBER.sub("#", one.strip()) != NUMBER.sub("#", other.strip()):
        return False
    pairs = zip(map(float, NUMBER.findall(one)), map(float, NUMBER.findall(other)))
    return all(a == pytest.approx(b, rel=0.05, abs=0.05) for a, b in pairs)


def test_the_page_lists_all():
    assert sorted(table()) == sorted([*SCRIPTS, *NOTEBOOKS])
    assert all(table().values())


@pytest.mark.parametrize("name", [name for name in SCRIPTS if ON.get(name, "tensorflow") == BACKEND])
def test_script(name, tmp_path, monkeypatch, capfd):
    """It ends without an error, and prints the output on the page."""
    if "keras_tuner" in (EXAMPLES / name).read_text(encoding="utf-8"):
        pytest.importorskip("keras_tuner", reason="KerasTuner is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name)])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    if name in ALONE:
        code = subprocess.run([sys.executable, str(EXAMPLES / name)], check=False).returncode
    else:
        code = _run(EXAMPLES / name)
    printed = capfd.readouterr()
    assert not code, f"{code}\n{printed.out}\n{printed.err[-2000:]}"
    lines = printed.out.splitlines()
    missing = [line for line in table()[name] if not any(agrees(line, other) for other in lines)]
    assert not missing, printed.out


def _run(path: Path) -> object:
    """Run a script in this process; return its exit code."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.requires_backend("tensorflow", reason="the notebooks are on TensorFlow")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name, tmp_path, monkeypatch):
    """Run from the start in a separate kernel, it gives its stored output."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    stored = nbformat.read(EXAMPLES / name, as_version=4)
    again = nbformat.read(EXAMPLES / name, as_version=4)
    nbclient.NotebookClient(again, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [(one, other) for one, other in zip(stored.cells, again.cells) if one.cell_type == "code"]
    for one, other in cells:
        assert _kinds(one) == _kinds(other), one.source
        assert len(_text(one)) == len(_text(other)) and all(map(agrees, _text(one), _text(other))), "\n".join(_text(other))
    lines = [line for one, _ in cells for line in _text(one)]
    assert [line for line in table()[name] if line not in lines] == []


def _kinds(cell: object) -> list[str]:
    """Return the kinds of output of a cell besides text: pictures and tables."""
    return sorted(kind for output in cell.outputs for kind in output.get("data", {}))


def _text(cell: object) -> list[str]:
    """Return the printed lines of a cell, without those that only a slow machine prints."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
    return tidied(printed).splitlines()
