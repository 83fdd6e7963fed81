"""Each command with each wrong input: one sentence, exit code 2."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.command_line import main

MISUSE = 2

pytestmark = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")


def _at(name, make=lambda path: None):
    """Return a function that makes something under this name in a folder, and returns its path."""

    def made(folder):
        make(folder / name)
        return folder / name

    return made


def _written(name, data):
    return _at(name, lambda path: path.write_bytes(data))


def _archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "a model")


def _unreadable(path):
    path.write_bytes(b"PK\x03\x04")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")


INPUTS = {
    "missing": _at("missing.keras"),
    "in a missing folder": _at("nowhere/model.keras"),
    "a folder": _at("folder.keras", Path.mkdir),
    "empty": _written("empty.keras", b""),
    "text as .keras": _written("text.keras", b"This is a model.\nReally.\n"),
    "text as .h5": _written("text.h5", b"This is a model.\n"),
    "text as .npz": _written("text.npz", b"This is an array.\n"),
    "text as .toml": _written("text.toml", b"This is a policy.\n"),
    "text as .json": _written("text.json", b"This is a policy.\n"),
    "text as .yaml": _written("text.yaml", b": - [\n"),
    "text as .jsonl": _written("text.jsonl", b"This is an incident.\n"),
    "no text as .json": _written("bytes.json", bytes(range(128, 256))),
    "no text as .toml": _written("bytes.toml", bytes(range(128, 256))),
    "nested .json": _written("nested.json", b"[" * 100_000),
    "no table as .json": _written("null.json", b"null"),
    "a format and nothing else": _written("format.json", b'{"format": 1}'),
    "a list as .jsonl": _written("list.jsonl", b"[1]"),
    "wrong ending": _written("model.txt", b"\x89HDF\r\n\x1a\n"),
    "start of an HDF5 file": _written("start.h5", b"\x89HDF\r\n\x1a\n" + bytes(60)),
    "start of an archive": _written("start.keras", b"PK\x03\x04" + bytes(60)),
    "another archive": _at("other.keras", _archive),
    "unreadable": _at("unreadable.keras", _unreadable),
    "a broken link": _at("link.keras", lambda path: path.symlink_to("missing")),
    "a pipe": _at("pipe.keras", os.mkfifo),
    "a name too long": _at("x" * 300 + ".keras"),
}

COMMANDS = {
    "scan": ["scan", "{}"],
    "repair": ["repair", "{}"],
    "source": ["repair", "{model}", "--weights", "source", "--source", "{}"],
    "recalibrate": ["recalibrate", "{}", "--data", "{data}"],
    "lint": ["lint", "{}"],
    "diagnose": ["diagnose", "{}", "--data", "{data}"],
    "data": ["diagnose", "{model}", "--data", "{}"],
    "check-policy": ["check-policy", "{}"],
    "model of a policy": ["check-policy", "recover", "--model", "{}"],
    "replay": ["replay", "{}"],
    "report": ["report", "{}"],
}


@pytest.fixture
def good(tmp_path):
    """Return the weights of a model with one bad value, and data."""
    np.savez(tmp_path / "good.npz", **{"dense/kernel": np.full((2, 2), np.nan, "f4")})
    np.save(tmp_path / "data.npy", np.ones((4, 2), "f4"))
    return {"model": str(tmp_path / "good.npz"), "data": str(tmp_path / "data.npy")}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_input_is_one_sentence(command, given, good, tmp_path, capfd):
    """No traceback, nothing on stdout, nothing written."""
    path = str(INPUTS[given](tmp_path))
    before = sorted(tmp_path.rglob("*"))
    code = main([word.format(path, **good) for word in COMMANDS[command]])
    captured = capfd.readouterr()
    reported = [line for line in captured.err.splitlines() if line.startswith("keras-nanguard: ")]
    # a policy that can be read, and is wrong, is a finding
    if command == "check-policy" and code == 1:
        assert captured.out and not reported
        return
    assert code == MISUSE, captured
    assert len(reported) == 1
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert len(reported[0]) < 600
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    (
        ["scan", "x", "--limit", "-1"],
        ["repair", "x", "--slots", "source"],
        ["scan", "x", "--limit", "nan"],
    ),
)
def test_wrong_values_of_options(words, good, capsys):
    assert main([good["model"] if word == "x" else word for word in words]) == MISUSE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    (
        ["recalibrate", "m.keras", "--data", "x.npy", "--steps", "-1"],
        ["recalibrate", "m.keras", "--data", "x.npy", "--batch-size", "0"],
        ["diagnose", "m.keras", "--data", "x.npy", "--rows", "0"],
        ["diagnose", "m.keras", "--data", "x.npy", "--rows", "-3"],
        ["diagnose", "m.keras", "--data", "x.npy", "--rows", "1.5"],
    ),
)
def test_numbers_that_cannot_be_are_misuse(words, capsys):
    """A number of rows or batches out of range: the option, before a file is opened."""
    assert main(words) == MISUSE
    assert f"argument {words[-2]}: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a saved model whose inputs are rows of four numbers."""
    keras = pytest.importorskip("keras")
    path = tmp_path_factory.mktemp("model") / "m.keras"
    keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    ).save(path)
    return str(path)


ROWS = np.ones((8, 4), "float32")
DATA = {
    "another shape": {"x": np.ones((8, 5), "float32")},
    "text": {"x": np.array(["a", "b"])},
    "no rows": {"x": ROWS[:0]},
    "a number": {"x": np.float32(1)},
    "other names": {"a": ROWS, "b": ROWS[:, :2]},
    "fewer targets": {"x": ROWS, "y": np.ones((5, 1))},
}


@pytest.mark.parametrize("given", DATA)
@pytest.mark.parametrize("command", ("recalibrate", "diagnose"))
def test_data_that_a_model_does_not_take(command, given, model, tmp_path, capfd):
    """One sentence and exit code 2 for any exception of Keras, because nothing was found."""
    np.savez(tmp_path / "data.npz", **DATA[given])
    assert main([command, model, "--data", str(tmp_path / "data.npz")]) == MISUSE
    printed, error = capfd.readouterr()
    assert "Traceback" not in error and "Nothing bad" not in printed
    assert len([line for line in error.splitlines() if line.startswith("keras-nanguard: ")]) == 1


def test_data_of_many_arrays_that_store_nothing(model, tmp_path, capfd):
    """Each of them is small enough, all together are not."""
    zeros = np.zeros((100 << 20, 1), "u1")
    np.savez_compressed(tmp_path / "data.npz", a=zeros, b=zeros)
    assert main(["diagnose", model, "--data", str(tmp_path / "data.npz")]) == MISUSE
    assert "unpacks to far more data than it stores" in capfd.readouterr().err


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder without write permission")
def test_an_output_that_cannot_be_written(good, model, tmp_path, capsys):
    """It is reported as such, not as an unreadable input."""
    recalibrated = ["recalibrate", model, "--data", good["data"], "-o", "/proc/out.keras"]
    np.save(good["data"], ROWS)
    for words in (
        ["repair", good["model"], "--weights", "zeros", "-o", "/proc/out.npz"],
        recalibrated,
    ):
        assert main(words) == MISUSE
        assert f"keras-nanguard: {words[-1]} cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "watch", "replay"])
def test_a_name_that_is_too_long_to_be_read(command, capsys):
    assert main([command, name := "a" * 300]) == 2
    assert capsys.readouterr().err == f"keras-nanguard: {name}: File name too long.\n"


def test_a_model_without_permission_cannot_be_read(good, monkeypatch, capsys):
    pytest.importorskip("keras")

    def refuse(path, *more, _open=open, **named):
        if path == good["model"]:
            raise PermissionError(13, "Permission denied", path)
        return _open(path, *more, **named)

    monkeypatch.setattr("builtins.open", refuse)
    assert main(["lint", good["model"]]) == MISUSE
    error = capsys.readouterr().err
    assert "cannot be read: " in error and "written" not in error


def test_an_imported_module_that_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "boom.py").write_text("raise ValueError('boom')")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "bundle.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "bundle", "--import", "boom"]) == MISUSE
    assert "ValueError: boom" in capsys.readouterr().err


def test_a_defect_of_the_library_is_not_found_either(good, monkeypatch, capsys):
    """Exit code 2 and one sentence, which tells how to see where it occurred."""
    monkeypatch.setattr("keras_nanguard._cli.output.progress", lambda: 1 // 0)
    assert main(["scan", good["model"]]) == MISUSE
    assert "ZeroDivisionError" in (text := capsys.readouterr().err) and text.count("\n") == 1


def test_a_model_that_keras_cannot_load(tmp_path, capsys):
    pytest.importorskip("keras")

    for config in (
        "[]",
        "{}",
        '{"class_name": "Sequential", "config": {"layers": [{"class_name": "No"}]}}',
        "nonsense",
    ):
        with zipfile.ZipFile(tmp_path / "odd.keras", "w") as archive:
            archive.writestr("metadata.json", "{}")
            archive.writestr("config.json", config)
            archive.writestr("model.weights.h5", b"")
        assert main(["lint", str(tmp_path / "odd.keras")]) == MISUSE
        error = capsys.readouterr().err
        assert "Traceback" not in error and error.count("\n") == 1
