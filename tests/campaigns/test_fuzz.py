"""A short run of the fuzzing campaign: its oracles work, and its mutations find nothing."""

import ctypes
import os
import sqlite3
import subprocess
import tempfile

import pytest

from campaigns import fuzz_files, fuzz_seeds
from campaigns.fuzz import Bench
from campaigns.fuzz_folders import outside
from campaigns.fuzz_oracles import Watch, Wrong, check_page, check_printed
from campaigns.fuzz_recipes import json_text, packed, plain, toml_text, unpacked
from campaigns.fuzz_targets import TARGETS
from keras_nanguard import FileFormatError

pytestmark = pytest.mark.requires_backend("tensorflow", reason="readers are the same on each backend")

MUTATIONS = 6
"""Number of executions of each target; `make fuzz` runs tens of thousands."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Return a function that creates the bench of a target, all with one watch."""
    folder = tmp_path_factory.mktemp("fuzz")
    before = tempfile.tempdir
    (folder / "run").mkdir()
    fuzz_seeds.trained(folder / "run")
    fuzz_seeds.save(folder / "run", folder / "seeds")
    watch = Watch(folder / "bench" / "inputs")
    made: dict[str, Bench] = {}

    def make(name):
        if name not in made:
            made[name] = Bench(TARGETS[name], folder / "bench", watch)
        return made[name]

    yield make
    tempfile.tempdir = before


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(bench, name):
    """Files of a run, and mutations of them, are read or rejected, without any other effect."""
    if name == "orbax":
        pytest.importorskip("tensorstore")
    made = bench(name)
    for number, seed in enumerate(made.seeds):
        assert made.run(seed, commands=number == 0) == []
    recipe = None
    for number in range(MUTATIONS):
        recipe = made.mutated(recipe if number % 3 else None, number)
        assert made.run(recipe, commands=False) == [], recipe
    assert made.executions > MUTATIONS // 2


PLANTED = {
    "error": lambda folder: {}["missing"],
    "code": lambda folder: os.system("true"),
    "code by a process": lambda folder: subprocess.run(["true"], check=True),
    "code by an import": lambda folder: __import__("this_is_no_module_of_any_name"),
    "code that is compiled": lambda folder: eval("1 + 1"),
    "code of a library": lambda folder: ctypes.CDLL(None),
    "write": lambda folder: (folder.parent / "outside" / "new.txt").write_text(""),
    "write by renaming": lambda folder: (folder / "a").rename(folder.parent / "outside" / "a"),
    "write by a link": lambda folder: (folder / "link").write_text(""),
    "write of a library": lambda folder: sqlite3.connect(f"file:{folder.parent}/outside/a.sqlite", uri=True).execute("CREATE TABLE t (a)"),
    "read": lambda folder: (folder.parent / "outside" / "secret.txt").read_text(),
    "memory": lambda folder: len(bytearray(400 << 20)),
    "output": lambda folder: check_printed("\x1b[31m", "here"),
    "output of a message": lambda folder: _raise(FileFormatError("a\x1bb")),
    "output of a long message": lambda folder: _raise(FileFormatError("a" * 10_000)),
}


def _raise(error):
    raise error


@pytest.mark.parametrize("name", PLANTED)
def test_an_oracle_detects_its_kind(tmp_path, monkeypatch, name):
    """Each forbidden action is detected when it is done on purpose, by its own oracle."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    watch = Watch(tmp_path / "inputs")
    outside(tmp_path / "outside")
    (tmp_path / "inputs" / "a").write_text("")
    (tmp_path / "inputs" / "link").symlink_to(tmp_path / "outside" / "by_link.txt")
    found = watch.run(lambda: PLANTED[name](tmp_path / "inputs"), 100)
    assert name.split()[0] in {finding.oracle for finding in found}, found
    assert watch.run(lambda: (tmp_path / "inputs" / "b").write_text("x"), 100) == []


def test_time_is_bounded(tmp_path, monkeypatch):
    """A reader that does not return is interrupted, even if it catches every exception."""
    monkeypatch.setattr("campaigns.fuzz_oracles.SECONDS", 0.2)
    monkeypatch.setattr(tempfile, "tempdir", None)

    def endless():
        while True:
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001 (as a reader might)
                continue

    assert [finding.oracle for finding in Watch(tmp_path).run(endless, 1)] == ["time"]


PAGE = "<html><meta charset='utf-8'><link rel='icon' href='data:,'><script>1</script><p title='a'>text</p></html>"


ACTING = ("<script>2</script>", "<img src=x onerror=a()>", "<a href='javascript:a()'>", "<iframe></iframe>", "<meta http-equiv='refresh'>")


@pytest.mark.parametrize("more", ACTING)
def test_active_elements_of_a_page_are_detected(more):
    """New scripts, handlers, frames and addresses are detected; text is ignored."""
    check_page(PAGE.replace("text", "&lt;script&gt;"), PAGE)
    with pytest.raises(Wrong):
        check_page(PAGE.replace("text", more), PAGE)


def test_recipes_are_files(tmp_path):
    """It can be read with its content, and a recipe survives the conversion to bytes."""
    import h5py
    import numpy as np

    (tmp_path / "a.npz").write_bytes(fuzz_files.npz([{"name": "a.npy", "shape": [2], "body": "0000803f" * 2, "deflated": True}]))
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["a"].tolist() == [1.0, 1.0]
    again = fuzz_files.npz(fuzz_files.read_npz(tmp_path / "a.npz"))
    (tmp_path / "b.npz").write_bytes(again)
    assert fuzz_files.read_npz(tmp_path / "b.npz") == fuzz_files.read_npz(tmp_path / "a.npz")
    tree = {"nodes": [{"path": "a/b", "shape": [3], "dtype": "f4", "data": [1, 2, 3], "attrs": {"name": "x"}}]}
    (tmp_path / "a.h5").write_bytes(fuzz_files.hdf5(tree))
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["a/b"][:].tolist() == [1, 2, 3] and file["a/b"].attrs["name"] == "x"
    recipe = {"tree": {"a": [{"!": "deep", "n": 3}, {"!": "raw", "text": "NaN"}, {"!": "long", "text": "ab", "n": 2}]}}
    assert json_text(recipe["tree"]) == '{"a": [[[[]]], NaN, "abab"]}' and toml_text(recipe["tree"]) == 'a = [[[[]]], NaN, "abab"]\n'
    assert plain(recipe["tree"])["a"][0] == [[[[]]]] and unpacked(packed(recipe)) == recipe
    assert unpacked(b"[") is None and unpacked(b"[]") is None
