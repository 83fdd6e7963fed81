"""An editor shows every public name with its type, although names are imported on first use."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from support.public_api import listed

import keras_nanguard
from keras_nanguard import Diagnosis, Finding

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "support" / "users_file.py"

WRONG = {
    'NanGuard(verbose="loud")': "verbose",
    "NanGuard().incidents[0].setp": "setp",
    'NanGuard().report(1).name + "x"': "report",
    "NanGuard().step(3)": "step",
    "keras_nanguard.NanGaurd": "NanGaurd",
    'NanGuard(directry="run1")': "directry",
    "NanGuard(snapshto={})": "snapshto",
    'NanGuard(max_consecutive_refused="three")': "max_consecutive_refused",
    'NanGuard().incidents[0].findings[0].site == "gradient"': "gradient",
    'NanGuard().incidents[0].findings[0].kind == "nan"': "nan",
    'Diagnosis().cause == "divergance"': "divergance",
    'Diagnosis("divergance")': "divergance",
    "NanGuard().step(train_step)(1.0, 2.0)": "arguments",
    'NanGuard().step(train_step)("one")': "str",
    'NanGuard().step(train_step)(1.0) + "x"': "operand",
}
"""Mistakes, each with a word that the error message must contain."""


MISTAKES_AFTER = (
    "import keras_nanguard",
    "from keras_nanguard import Diagnosis, NanGuard",
    "def train_step(x: float) -> float:",
    "    return x",
)


def test_types_have_the_words_of_the_lists():
    """A type checker has the same sites, kinds and causes as the library."""
    finding, diagnosis = (get_type_hints(record) for record in (Finding, Diagnosis))
    for words, family in ((finding["site"], "site"), (finding["kind"], "kind"), (diagnosis["cause"], "cause")):
        assert sorted(get_args(words)) == list(listed(family))


def test_the_file_uses_every_public_name():
    text = FILE.read_text(encoding="utf-8")
    assert [name for name in keras_nanguard.__all__ if not re.search(rf"\b{name}\b", text)] == []


def _with_mistakes(folder: Path) -> Path:
    path = folder / "mistakes.py"
    lines = [f"print({mistake})" for mistake in WRONG]
    path.write_text("\n".join([*MISTAKES_AFTER, *lines, ""]))
    return path


def _mypy(path: Path, folder: Path) -> str:
    config = folder / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\nfollow_imports = silent\n[mypy-keras.*]\nignore_missing_imports = true\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(folder / "cache"), str(path)]
    environment = {"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False).stdout


def test_mypy_strict(tmp_path):
    """mypy in strict mode reports nothing for the user's file, and each mistake in another one."""
    pytest.importorskip("mypy", reason="takes mypy")
    assert "Success" in (said := _mypy(FILE, tmp_path)), said
    said = _mypy(_with_mistakes(tmp_path), tmp_path)
    for line, mistake in enumerate(WRONG, len(MISTAKES_AFTER) + 1):
        assert f"mistakes.py:{line}: error" in said, (mistake, said)
