"""What is built wrong, as what is damaged: each gives a result or one sentence, in little memory
and little time."""

from __future__ import annotations

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from support import zoo
from support.wrong_files import WRONG

zoo.once()

MEMORY = 1 << 30
"""Bytes that a process may take which scans, repairs and names one of these files; the largest of
them has 2 MB."""

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
import io, json
from keras_nanguard import FileFormatError, repair, scan
from keras_nanguard.__main__ import main

path, found = sys.argv[1], {}
for name, do in {
    "scan": lambda: json.dumps(scan(path).to_dict(), allow_nan=False),
    "repair": lambda: str(repair(path, path + ".out", weights="initial", overwrite=True)),
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
    """Scan, name and repair a file in a process of its own; returns what each gave, and the memory
    that it took."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reported = json.loads(done.stdout)
    return reported["found"], reported["memory"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_structure_gives_a_result_or_one_sentence(name, tmp_path):
    """Scan, repair and the names for a policy: no other error, less than a gigabyte, less than a
    minute."""
    path = WRONG[name](tmp_path)
    assert path.stat().st_size < 2 << 20
    found, memory = outcome(path)
    for kind, text in found.values():
        assert kind == "result" or ("\n" not in text and text.isprintable()), text
    assert memory < MEMORY


def _samples(folder):
    """Write a small file of each kind; returns their paths."""
    made = [
        WRONG[name](folder / str(number))
        for number, name in enumerate(SOUND)
        if not (folder / str(number)).mkdir()
    ]
    with h5py.File(folder / "legacy.h5", "w") as file:
        for layer in ("dense", "bn"):
            file[f"model_weights/{layer}/{layer}/kernel"] = np.full((3, 3), np.nan)
        file.attrs["model_config"] = json.dumps({"config": {"layers": []}})
    return [*made, folder / "legacy.h5"]


SOUND = (
    "big-endian",
    "layer of fill value",
    "values in Fortran's order",
    "initialiser of NaN",
    "attributes of other kinds",
)

CAMPAIGN = (
    MEASURED
    + """
import json, random
from keras_nanguard import FileFormatError, repair, scan

target, seed, count, *samples = sys.argv[1:]
draw = random.Random(int(seed))
samples = [open(sample, "rb").read() for sample in samples]
reported = {"result": 0, "refused": 0}
for number in range(int(count)):
    data = bytearray(draw.choice(samples))
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(data))
        size = draw.randint(1, 8)
        new = draw.choice((draw.randbytes(size), b"\\xff" * size, bytes(size)))
        data[at : at + draw.choice((len(new), len(new), 0, 4))] = new
    open(target, "wb").write(data)
    try:
        json.dumps(scan(target).to_dict(), allow_nan=False)
        weights = draw.choice(("zeros", "initial"))
        str(repair(target, target + ".out", weights=weights, overwrite=True))
        reported["result"] += 1
    except FileFormatError as error:
        assert "\\n" not in str(error), error
        reported["refused"] += 1
    except BaseException:
        print(f"file {number} of seed {seed}", file=sys.stderr)
        raise
print(json.dumps({**reported, "memory": memory()}))
"""
)


def campaign(folder, seed, count, timeout):
    """Change bytes of small files at random, and scan and repair each, all in one process of its
    own."""
    words = [str(folder / "fuzzed"), str(seed), str(count), *map(str, _samples(folder))]
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN, *words], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reported = json.loads(done.stdout)
    assert reported["memory"] < MEMORY
    assert reported["result"] > count // 20 and reported["refused"] > count // 20
    return reported


def test_changed_bytes_give_a_result_or_one_sentence(tmp_path):
    """A short campaign over every kind of file."""
    campaign(tmp_path, 0, 25, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 103))
def test_a_long_campaign_of_changed_bytes(seed, tmp_path):
    """The same for thousands of files."""
    campaign(tmp_path, seed, 1000, 3000)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells how much a process holds"
)
def test_what_hdf5_reserves_is_bounded(tmp_path):
    """The process that reads a file cannot exceed its memory limit, whatever a library requests; a
    large file gets more."""
    code = (
        "import sys, numpy as np; from keras_nanguard._files import worker\n"
        "worker.MAX_MEMORY = 200 << 20; worker._limit_memory(sys.argv[1])\n"
        "worker.TASKS['scan'] = lambda *_: {'size': np.ones(1 << 26).nbytes}\n"
        "print(worker.answer({'task': 'scan', 'path': 'x.keras', 'details': {}}, print))\n"
    )
    found = []
    for size in (0, 1 << 26):
        (tmp_path / "file").write_bytes(bytes(size))
        command = [sys.executable, "-c", code, str(tmp_path / "file")]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "'refused': 'x.keras cannot be read" in found[0] and str(1 << 29) in found[1]
