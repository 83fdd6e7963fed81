"""A file is never trusted: nothing in it is followed, unpickled or run."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
from support.command_line import main

from keras_nanguard import FileFormatError, repair, scan

pytestmark = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")


def refusal(path):
    """Return the sentence with which a file is rejected."""
    with pytest.raises(FileFormatError) as caught:
        scan(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.isprintable()
    return sentence


def unread(path):
    report = scan(path)
    assert not report.ok
    assert not report.finite
    first = {e.location: e.problems[0] for e in report.variables if e.problems}
    return {place: problem.detail for place, problem in first.items() if problem.code == "unread"}


def test_anything_but_a_model_file_is_rejected_with_one_sentence(make, tmp_path):
    """Missing, empty, foreign, a folder, a device, a name with a NUL: each has its sentence."""
    assert "There is no such file" in refusal(tmp_path / "missing.keras")
    assert "empty file" in refusal(make.raw(b""))
    assert "starts with b'hello wo'" in refusal(make.raw(b"hello world"))
    assert "neither" in refusal(tmp_path)
    assert "which is not a file" in refusal("/dev/null")
    assert "There is no such file" in refusal("a\0b")
    assert "weight_map" in refusal(make.raw(b'{"a": 1}'))
    assert "cannot be read" in refusal(make.raw(b"{" * 100_000))
    assert "with 1 members" in refusal(zipped(make, {"readme.txt": b"x"}))


def zipped(make, members, name="any.zip", compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return make.raw(buffer.getvalue(), name)


@pytest.mark.parametrize("share", (0.1, 0.5, 0.9, 0.999))
@pytest.mark.parametrize("kind", ("keras", "weights", "npz"))
def test_a_truncated_file_is_refused_or_its_rest_is_reported_missing(make, kind, share):
    made = make.npz(a=np.arange(500.0)) if kind == "npz" else getattr(make, kind)()
    with open(made, "rb") as file:
        data = file.read()
    try:
        assert not scan(make.raw(data[: int(len(data) * share)])).ok
    except FileFormatError as error:
        assert "\n" not in str(error)


def test_no_pickle_is_loaded(make, tmp_path):
    """An object array in an `.npz` is reported and not read; its payload does not run."""
    mark = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (os.system, (f"touch {mark}",))

    path = tmp_path / "evil.npz"
    np.savez(path, good=np.ones(3), evil=np.array([Payload()], dtype=object))
    assert "never loaded" in unread(path)["evil"]
    assert not mark.exists()
    refusal(make.raw(pickle.dumps(Payload())))
    assert not mark.exists()


def test_links_that_lead_out_of_a_file_are_not_followed(make, tmp_path):
    """Soft, external, virtual and externally stored arrays are reported, not opened."""
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["x"] = np.full(4, np.nan)
    (tmp_path / "raw.bin").write_bytes(b"\xff" * 64)
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "x", (4,))
    path = tmp_path / "links.weights.h5"
    with h5py.File(path, "w") as file:
        file["external"] = h5py.ExternalLink(str(secret), "/x")
        file["soft"] = h5py.SoftLink("/external")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("stored", (8,), "f8", external=[(str(tmp_path / "raw.bin"), 0, 64)])
        file["named_type"] = np.dtype("f4")
    reasons = unread(path)
    assert set(reasons) == {"external", "soft", "virtual", "stored", "named_type"}
    assert all("not followed" in reasons[name] for name in ("external", "soft"))
    assert all(entry.statistics is None for entry in scan(path).variables)


def test_a_loop_of_links_ends(tmp_path):
    path = tmp_path / "loop.weights.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("a/b")
        group["back"] = file["a"]
        group["x"] = np.ones(3)
        file["again"] = group["x"]
    assert sum(entry.statistics is not None for entry in scan(path).variables) == 1


def test_groups_without_end_are_cut_off_loudly(tmp_path):
    """Nested deeper than any model: not entered, and the scan reports this."""
    path = tmp_path / "deep.weights.h5"
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(3000):
            group = group.create_group("g")
        group["x"] = np.ones(3)
    assert any("groups within groups" in reason for reason in unread(path).values())


def test_a_dataset_that_declares_far_more_than_it_stores_is_not_read(tmp_path):
    """A shape bomb costs neither memory nor time."""
    path = tmp_path / "bomb.weights.h5"
    with h5py.File(path, "w") as file:
        layout = {"chunks": (1 << 20,), "compression": "gzip"}
        file.create_dataset("one", (1 << 31,), "f4", **layout)
        file.create_dataset("chunk", (1 << 29,), "f4", chunks=(1 << 29,), compression="gzip")
        file.create_dataset("endless", (1 << 60,), "f4", **layout)
        for number in range(64):
            file.create_dataset(f"many{number}", (1 << 27,), "f4", **layout)
        file["fine"] = np.ones(3)
    reasons = unread(path)
    assert "one chunk declares" in reasons["chunk"]
    assert all("more than 1000 times" in reasons[name] for name in ("one", "endless", "many63"))
    assert "fine" not in reasons


def test_a_zip_bomb_is_refused(make, set_limit):
    set_limit("bytes that any file may declare", 1 << 16)
    bomb = zipped(make, {"model.weights.h5": bytes(1 << 20)}, "bomb.keras")
    with pytest.raises(FileFormatError, match="zip bomb"):
        scan(bomb)


def test_compressed_weights_that_unpack_to_far_more_than_they_store_are_refused(tmp_path):
    """A temporary folder may be in memory, which no limit of a process bounds."""
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros((160 << 20,), "u1")
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(FileFormatError, match="unpacks to"):
        scan(path)


def test_a_member_that_unpacks_to_more_than_it_declares_is_refused(make):
    path = make.keras(compression=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("model.weights.h5").file_size
    with open(path, "rb") as file:
        data = file.read().replace(struct.pack("<I", size), struct.pack("<I", 64))
    assert "cannot be read" in refusal(make.raw(data))


ENDLESS = (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
"""Methods by which `zipfile` unpacks more than it was asked for."""


@pytest.mark.parametrize("method", ENDLESS)
def test_a_member_that_is_neither_stored_nor_deflated_is_refused(make, method, capsys):
    """In a model, beside other arrays, in data for a model: with the remedy, damaged or not."""
    path = make.keras(compression=method)
    assert "stored or deflated" in refusal(path) and "numpy.savez" in refusal(path)
    path = zipped(make, {"config.json": b"{}"}, "model.keras", method)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr("model.weights.h5", make.weights_bytes())
    assert "stored or deflated" in scan(path).notes[0]
    for damaged in (False, True):
        path = zipped(make, {"bad.npy": npy(np.random.default_rng(0).normal(size=999))}, "a.npz", method)
        with open(path, "r+b") as file:
            file.seek(400 if damaged else 0)
            file.write(bytes(30) if damaged else b"")
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("good.npy", npy(np.ones(3)))
        reasons = unread(path)
        assert list(reasons) == ["bad"] and "stored or deflated" in reasons["bad"]
        assert main(["lint", make.keras(), "--data", path]) == 2
        assert "stored or deflated" in capsys.readouterr().err


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_a_member_that_lies_about_its_place_is_refused(make):
    path = make.keras()
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("model.weights.h5").header_offset
    with open(path, "rb") as file:
        data = file.read()
    for new in (offset + 1, len(data) - 10, 2**31):
        refusal(make.raw(data.replace(struct.pack("<I", offset), struct.pack("<I", new))))


def test_an_encrypted_member_is_refused(make):
    with open(make.keras(), "rb") as file:
        data = bytearray(file.read())
    at = data.rfind(b"PK\x01\x02")
    data[at + 8] |= 1
    assert "encrypted" in refusal(make.raw(bytes(data)))


@pytest.mark.parametrize(
    "name", ("../x.weights.h5", "/etc/passwd", "a/b.h5", "C:x.h5", "..", "", "a\\b.h5", 3, None)
)
def test_a_shard_outside_of_its_folder_is_refused(make, name):
    assert "outside the folder" in refusal(
        make.raw(json.dumps({"weight_map": {"/a": name}}).encode(), "x.weights.json")
    )


def test_a_missing_shard_is_reported_by_name(make):
    path = make.sharded()
    os.unlink(make.folder / "model_00001.weights.h5")
    assert "model_00001.weights.h5" in refusal(path)


def test_names_from_a_file_are_safe_to_print(make):
    """Escapes, line breaks, markup and bytes that are not UTF-8 are escaped."""
    path = make.folder / "names.weights.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset(b"\xff\xfe", data=np.full(3, np.nan))
        file["\x1b[31mred\n"] = np.full(3, np.nan)
        file["[bold]x"] = np.full(3, np.nan)
        file.create_group("layers/dense/vars").attrs["name"] = "\x1b]0;title\x07" * 99
        file["layers/dense/vars/0"] = np.full((2, 2), np.nan)
    report = scan(path)
    assert len(report.bad) == 4
    assert all(line.isprintable() for line in str(report).splitlines())
    assert all(len(entry.path) < 400 for entry in report.variables)
    json.dumps(report.to_dict(), allow_nan=False).encode("utf-8")


def test_a_hostile_configuration_costs_names_and_nothing_else(make):
    """Broken, foreign, nested or huge JSON: the weights are scanned, and a note reports it."""
    for config in (
        b"\xff{",
        b"[" * 100_000,
        b"[]",
        b'{"config": {"layers": 3}}',
        b'{"config": {"layers": [null, 1]}}',
    ):
        report = scan(make.keras({make.KERNEL: np.nan}, config=config))
        assert [entry.location for entry in report.bad] == [make.KERNEL]
    assert any("could not be parsed" in note for note in scan(make.keras(config=b"{")).notes)


def test_traversal_names_in_an_archive_write_nothing(make, tmp_path):
    """A repair copies members named `../x` unchanged and never unpacks them by name."""
    path = make.keras(
        {make.SECOND_VARIANCE: np.nan}, extra=[("../outside.txt", b"x"), ("/abs.txt", b"y")]
    )
    before = set(tmp_path.parent.iterdir())
    report = repair(path)
    assert set(tmp_path.parent.iterdir()) == before
    with zipfile.ZipFile(report.output) as archive:
        assert archive.read("../outside.txt") == b"x"


@pytest.mark.parametrize("name", ("model.h5", "model.weights.h5", "model.keras"))
def test_a_legacy_file_is_never_loaded(make, name, capsys):
    """It may contain code, which some versions of Keras run in safe mode: Keras never reads it."""
    path = make.weights(name=name)
    np.save(make.folder / "x.npy", np.ones((2, 4)))
    for words in (["lint"], ["diagnose", "--data", "x.npy"], ["recalibrate", "--data", "x.npy"]):
        words = [str(make.folder / word) if word == "x.npy" else word for word in words]
        assert main([*words, path]) == 2
        error = capsys.readouterr().err
        weights = name.endswith(".weights.h5")
        reason = "which has only weights" if weights else "a legacy file, which may contain code"
        assert reason in error and "save it as .keras" in error
    assert scan(path).ok


@pytest.mark.slow
def test_ten_thousand_layers_are_a_result(tmp_path):
    path = tmp_path / "many.weights.h5"
    with h5py.File(path, "w") as file:
        for number in range(10_000):
            values = np.full(3, np.nan if number == 7777 else 1.0, np.float32)
            file.create_dataset(f"layers/dense_{number}/vars/0", data=values)
    report = scan(path)
    assert report.counts["variables"] == 10_000
    assert report.layers[0].path == "dense_7777"


def odd_worker(monkeypatch, code):
    """Read files with a program that starts like the worker, and then runs other code."""
    program = f"print(chr(123) + chr(125), flush=True); input(); {code}"
    start, command = subprocess.Popen, [sys.executable, "-c", program]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(command, **options))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "crashes"),
        ("import os; os._exit(0)", "crashes"),
        ("print(5 * chr(123), end='', flush=True)", "crashes"),
        ("import ctypes; ctypes.PyDLL(None).pause()", "hangs"),  # with the interpreter's lock
        ("import os; os.mkfifo('pipe'); open('pipe')", "hangs"),
    ],
)
def test_a_library_that_hangs_or_crashes_on_a_file_is_a_sentence(
    code, reason, monkeypatch, set_limit, make, own_process
):
    """The file is read in another process: if that ends or hangs, the program continues."""
    path = make.weights()
    with monkeypatch.context() as briefly:
        odd_worker(briefly, code.replace("'pipe'", repr(str(make.folder / "pipe"))))
        set_limit("seconds until a reader hangs", 1.0)
        with pytest.raises(FileFormatError, match=reason):
            scan(path)
    set_limit("seconds until a reader hangs", 60.0)
    assert scan(path).ok


def test_a_worker_that_cannot_be_ended_is_abandoned(monkeypatch, set_limit, make, own_process):
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda self: None)
    set_limit("seconds until a reader is abandoned", 0.1)
    set_limit("seconds until a reader hangs", 0.5)
    odd_worker(monkeypatch, "import time; time.sleep(20)")
    with pytest.raises(FileFormatError, match="hangs"):
        scan(make.weights())


@pytest.mark.daily("file")
@pytest.mark.parametrize("layout", ("file", "folder of links", "shards", "source"))
def test_a_large_file_gets_more_time(monkeypatch, set_limit, make, own_process, layout):
    """One more second for each MiB, also through links, or beside one that leads nowhere."""
    odd_worker(
        monkeypatch, 'import time; time.sleep(2); print(\'{"refused": "late"}\', flush=True)'
    )
    set_limit("seconds until a reader hangs", 1.0)
    path = make.npz(a=np.zeros(1 << 20))
    if layout == "folder of links":
        os.mkdir(make.folder / "model")
        os.symlink(path, make.folder / "model" / "model.weights.h5")
        path = make.folder / "model"
    elif layout == "shards":
        os.symlink("nowhere", make.folder / "lost")
        path = make.raw(b"{}", "model.weights.json")
    with pytest.raises(FileFormatError, match="late"):
        repair(make.weights(), source=path) if layout == "source" else scan(path)


def test_nothing_is_imported_from_the_folder_of_the_files(make, monkeypatch, own_process):
    """Neither modules beside a model nor in the current folder, by the process that reads it."""
    for name in ("json", "numpy", "h5py", "keras_nanguard", "ml_dtypes"):
        (make.folder / f"{name}.py").write_text(f"open({str(make.folder / 'ran')!r}, 'w')")
    make.weights(name="model.weights.h5")
    monkeypatch.chdir(make.folder)
    assert scan("model.weights.h5").ok
    assert not (make.folder / "ran").exists()


def test_progress_crosses_from_the_child(make, own_process):
    seen = []
    scan(make.weights(), progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_header_of_any_length_is_read_in_part(make, monkeypatch):
    """A header that declares to be as long as its member is refused after 64 KiB of it."""
    header = b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 24) + bytes(1 << 24)
    path, read = zipped(make, {"a.npy": header}, "long.npz"), []
    plain = zipfile.ZipExtFile.read
    monkeypatch.setattr(
        zipfile.ZipExtFile, "read", lambda self, n=-1: read.append(n) or plain(self, n)
    )
    assert "a" in unread(path)
    assert max(read) <= 1 << 16 and -1 not in read


def test_a_header_without_end_is_a_reason(make):
    """NumPy reads an older header token by token, and raises its own error if it ends too early."""
    header = b"\x93NUMPY\x01\x00\x10\x00{'descr': (     \n"
    assert "EOF" in unread(zipped(make, {"a.npy": header, "b.npy": header}, "headers.npz"))["a"]


def test_entries_that_share_their_data_are_read_a_limited_number_of_times(make, set_limit):
    """An archive may list one member many times; older versions of Python read each."""
    set_limit("bytes that any file may declare", 1 << 21)
    set_limit("times its size that a file may declare", 1)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("0.npy", "w") as member:
            np.lib.format.write_array(member, np.zeros(1 << 17))
        archive.filelist.extend(archive.filelist[:1] * 20)
    path = make.raw(buffer.getvalue(), "shared.npz")
    reasons = [problem.detail for e in scan(path).variables for problem in e.problems]
    assert sum("declares more than" in reason for reason in reasons) == 20
