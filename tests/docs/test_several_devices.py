"""Run in another process: TensorFlow creates devices only before its first operation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.requires_backend("tensorflow", reason="the page is about MirroredStrategy")
def test_several_gpus():
    """The code of the page runs on two logical devices, and prints the output on the page."""
    command = [sys.executable, str(DOCS / "run_pages.py"), "--alone", str(DOCS / "howto" / "several_gpus.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 0, done.stdout + done.stderr
