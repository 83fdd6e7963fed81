"""A wrong structure gives a result or one sentence, with little memory and time."""

import json
import subprocess
import sys

import pytest
from support.wrong_files import WRONG

pytestmark = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")

MEMORY = 1 << 30
"""Maximum memory to scan, repair and name one of these files (up to 2 MB), in bytes."""

SECONDS = 180

MEASURED = """
import re, resource, sys

def memory():
    # Linux counts in `ru_maxrss` what the process held that started this one.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "linux":
        own = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(own, of_children) * (1 if sys.platform == "darwin" else 1024)
"""

PROGRAM = (
    MEASURED
    + """
import io, json, os
from keras_nanguard import FileFormatError, repair, scan
from keras_nanguard.__main__ import main

path, found = sys.argv[1], {}
output = os.path.join(os.path.dirname(path), "out_" + os.path.basename(path))
for name, do in {
    "scan": lambda: json.dumps(scan(path).to_dict(), allow_nan=False),
    "repair": lambda: str(repair(path, output, weights="initial", overwrite=True)),
}.items():
    try:
        found[name] = ["result", do()[:2000]]
    except FileFormatError as error:
        found[name] = ["refused", str(error)]
output = sys.stdout
sys.stdout = sys.stderr = io.StringIO()
code = main(["check-policy", "recover", "--model", path])
assert "Traceback" not in sys.stdout.getvalue() and code in (0, 1, 2)
sys.stdout, sys.stderr = output, sys.__stderr__
print(json.dumps({"found": found, "memory": memory()}))
"""
)


def outcome(path):
    """Scan, name and repair a file in a process; return the results and its memory."""
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    reported = json.loads(done.stdout)
    return reported["found"], reported["memory"]


@pytest.mark.daily("layer of fill value", "configuration of lists")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_structure_gives_a_result_or_one_sentence(name, tmp_path):
    """Scan, repair and names for a policy: no other error, under a gigabyte and a minute."""
    path = WRONG[name](tmp_path)
    assert path.stat().st_size < 2 << 20
    found, memory = outcome(path)
    for kind, text in found.values():
        assert kind == "result" or ("\n" not in text and text.isprintable()), text
    assert memory < MEMORY


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux reports the memory of a process"
)
def test_the_memory_of_hdf5_is_bounded(tmp_path):
    """No request of a library exceeds the limit of the process; a large file or source gets more."""
    code = (
        "import sys, numpy as np; from keras_nanguard._files import worker\n"
        "worker.MAX_MEMORY = 200 << 20; worker._limit_memory(sys.argv[1:])\n"
        "worker.TASKS['scan'] = lambda *_: {'size': np.ones(1 << 26).nbytes}\n"
        "print(worker.answer({'task': 'scan', 'path': 'x.keras', 'details': {}}, print))\n"
    )
    found = []
    (tmp_path / "small").touch()
    (tmp_path / "large").write_bytes(bytes(1 << 26))
    for names in (("small",), ("large",), ("small", "large")):
        command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in names)]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "'refused': 'x.keras cannot be read" in found[0] and all(str(1 << 29) in one for one in found[1:])
