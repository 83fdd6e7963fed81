"""What is built wrong, as what is damaged: each gives a result or one sentence, in little memory and little time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from wrong_files import WRONG

MEMORY = 1 << 30
"""Bytes that a process may take which scans, repairs and names one of these files; the largest of them has 2 MB."""

SECONDS = 60

PROGRAM = """
import json, resource, sys
from keras_nanguard._errors import FileFormatError
from keras_nanguard._files._model_names import model_names
from keras_nanguard._files._repair import repair
from keras_nanguard._files._scan import scan

path, found = sys.argv[1], {}
for name, do in {
    "scan": lambda: str(scan(path)) and json.dumps(scan(path).to_dict(), allow_nan=False),
    "names": lambda: repr(model_names(path)),
    "repair": lambda: str(repair(path, path + ".out", weights="zeros", overwrite=True)),
    "draw": lambda: str(repair(path, path + ".out", weights="initial", overwrite=True)),
}.items():
    try:
        found[name] = ["result", do()[:2000]]
    except FileFormatError as error:
        found[name] = ["refused", str(error)]
most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({"found": found, "memory": most * (1 if sys.platform == "darwin" else 1024)}))
"""



def outcome(path):
    """Scan, name and repair a file in a process of its own; returns what each gave, and the memory that it took."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    return told["found"], told["memory"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_structure_gives_a_result_or_one_sentence(name, tmp_path):
    """Scan, repair and the names for a policy: no other error, less than a gigabyte, less than a minute."""
    path = WRONG[name](tmp_path)
    assert path.stat().st_size < 2 << 20
    found, memory = outcome(path)
    for kind, text in found.values():
        assert kind == "result" or ("\n" not in text and text.isprintable()), text
    assert memory < MEMORY
