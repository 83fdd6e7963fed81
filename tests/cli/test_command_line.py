"""Exit codes, one sentence for an error, JSON for machines, a fast start without a backend."""

import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
from support.command_line import main

CLEAN, FOUND, MISUSE = 0, 1, 2
DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.weights.h5"
    with h5py.File(path, "w") as file:
        for place, value in enumerate((1.0, 0.5, 0.0, 1.0)):
            file[f"layers/batch_normalization/vars/{place}"] = np.full(4, value, np.float32)
    return str(path)


@pytest.fixture
def bad(good, tmp_path):
    path = tmp_path / "bad.weights.h5"
    shutil.copy(good, path)
    with h5py.File(path, "r+") as file:
        file["layers/batch_normalization/vars/3"][...] = np.nan
    return str(path)


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "keras_nanguard", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_scan_has_exit_codes_for_clean_found_and_misuse(good, bad, tmp_path, capsys):
    """0 for clean files, 1 if any of several is bad, 2 if one cannot be read."""
    assert main(["scan", good]) == CLEAN
    assert "clean" in capsys.readouterr().out
    assert main(["scan", good, bad]) == FOUND
    assert "batch_normalization\n  moving_variance: 4 NaN (error)" in capsys.readouterr().out
    assert main(["scan", str(tmp_path / "missing")]) == MISUSE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_scan_continues_after_a_file_that_cannot_be_read(good, bad, tmp_path, capsys):
    """Each file is reported in its place; the exit code is that of the unreadable one."""
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04junk")
    assert main(["scan", good, str(tmp_path / "broken.npz"), bad, "--json"]) == MISUSE
    captured = capsys.readouterr()
    assert [json.loads(line)["clean"] for line in captured.out.splitlines()] == [True, False]
    assert "broken.npz cannot be read" in captured.err and captured.err.count("\n") == 1


def test_json_is_one_strict_document_a_line(good, bad, capsys):
    assert main(["scan", good, bad, "--json"]) == FOUND
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["clean"] for document in documents] == [True, False]
    assert main(["repair", bad, "--dry-run", "--json"]) == FOUND
    assert json.loads(capsys.readouterr().out)["changes"][0]["status"] == "done"
    assert main(["check-policy", "recover", "--json"]) == CLEAN
    assert json.loads(capsys.readouterr().out)["valid"] is True


def test_repair_writes_a_new_file_and_reports_its_changes(bad, tmp_path, capsys):
    """It is clean, and never overwritten by a second run; bad values left exit with 1."""
    assert main(["repair", bad]) == CLEAN
    assert "done batch_normalization/moving_variance: 4 of 4" in capsys.readouterr().out
    assert main(["scan", str(tmp_path / "bad.repaired.weights.h5")]) == CLEAN
    assert main(["repair", bad]) == MISUSE
    assert "overwrite it" in capsys.readouterr().err
    assert main(["repair", bad, "--statistics", "keep", "--overwrite"]) == FOUND
    assert main(["repair", bad, "--in-place"]) == CLEAN
    assert main(["scan", bad]) == CLEAN
    assert main(["scan", f"{bad}.bak"]) == FOUND


def test_a_policy_with_problems_is_a_finding_and_a_missing_one_is_misuse(tmp_path, capsys):
    """All problems are reported at once, one per line."""
    assert main(["check-policy", "recover"]) == CLEAN
    assert "max_consecutive_refused = 12" in capsys.readouterr().out
    path = tmp_path / "policy.json"
    path.write_text('{"rulse": [], "snapshot": {"every": -1}}')
    assert main(["check-policy", str(path)]) == FOUND
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["check-policy", str(tmp_path / "missing.toml")]) == MISUSE


def test_a_policy_part_without_effect_is_a_finding(good, tmp_path, capsys):
    """A rule that never acts gives a warning; with `--model` also a glob without a match."""
    path = tmp_path / "policy.json"
    late = {"name": "late", "site": "loss", "after": 20, "do": "stop"}
    glob = {"name": "glob", "site": "weights", "layer": "batch_normalisation", "do": "warn"}
    path.write_text(json.dumps({"rules": [glob]}))
    assert main(["check-policy", str(path)]) == CLEAN
    assert main(["check-policy", str(path), "--model", good]) == FOUND
    assert "warning: Rule 'glob' never acts" in (out := capsys.readouterr().out)
    assert "did you mean 'batch_normalization'" in out
    path.write_text(json.dumps({"rules": [late]}))
    assert main(["check-policy", str(path), "--json"]) == FOUND
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] and document["problems"] == []
    assert "never acts" in document["warnings"][0]
    assert main(["check-policy", str(path), "--model", str(tmp_path / "missing.keras")]) == MISUSE
    assert main(["check-policy", "recover", "--model", good]) == CLEAN


@pytest.mark.parametrize(
    "words",
    ([], ["bogus"], ["scan"], ["scan", "x", "--lim", "3"], ["repair", "x", "--weights", "y"]),
)
def test_misuse_is_reported_with_usage_and_exit_code_two(words, capsys):
    """Unknown words and missing arguments are rejected, and abbreviations are not guessed."""
    assert main(words) == MISUSE
    assert "usage: keras-nanguard" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error(bad):
    """`keras-nanguard scan ... | head -0` ends quietly, with the exit code of the command."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "keras_nanguard", "scan", bad, bad, "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    both = subprocess.run([*command, "missing"], stdout=write, stderr=write)
    prints = "import runpy, sys; sys.stderr.write('of a library'); runpy.run_module('keras_nanguard', run_name='__main__')"
    more = subprocess.run([sys.executable, "-c", prints, "scan", bad], stdout=write, stderr=write)
    os.close(write)
    assert (done.returncode, done.stderr, both.returncode, more.returncode) == (FOUND, "", MISUSE, FOUND)


@pytest.mark.daily(">&- 2>&- <&-")
@pytest.mark.skipif(os.name == "nt", reason="takes a POSIX shell")
@pytest.mark.parametrize("closed", (">&-", "2>&-", ">&- 2>&- <&-"))
def test_closed_streams_are_not_an_error(bad, closed):
    """`keras-nanguard scan ... >&-` ends with the exit code of the command."""
    command = f'"{sys.executable}" -m keras_nanguard scan "{bad}" missing {closed}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == MISUSE and "AttributeError" not in done.stderr
    command = command.replace(" missing", "")
    assert subprocess.run(command, shell=True, capture_output=True).returncode == FOUND


QUICK = (
    *(["--help"], ["scan", "{good}"], ["check-policy", "recover", "--model", "{good}"]),
    ["replay", "missing"],
)


@pytest.mark.parametrize("words", QUICK, ids=lambda words: words[0])
def test_the_start_imports_no_backend(words, good):
    """`--help`, `scan` and `check-policy` import no backend, and nothing else that loads slowly."""
    words = [word.format(good=good) for word in words]
    code = (
        "import sys, runpy\nsys.argv[0] = 'keras-nanguard'\n"
        "try: runpy.run_module('keras_nanguard', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "slow = ('keras', 'tensorflow', 'jax', 'torch', 'scipy', 'pandas', 'matplotlib')\n"
        "print([m for m in slow if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """Return the path of a saved model with one hazard and one bad layer."""
    keras = pytest.importorskip("keras")
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(name="bn"), layers.Dense(3, name="head")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.get_layer("bn").moving_variance.assign(np.full(4, np.nan))
    path = tmp_path_factory.mktemp("model") / "model.keras"
    model.save(path)
    return str(path)


def test_lint_loads_a_model_and_lists_its_hazards(model_file, tmp_path, capsys):
    """Hazards of the model, and with `--data` also those of the data; a rule can be ignored."""
    np.savez(tmp_path / "data.npz", x=np.ones((5, 4)), y=np.array([0, 1, 2, 3, 1]))
    assert main(["lint", model_file]) == FOUND
    assert "error logits_as_probabilities at head" in capsys.readouterr().out
    assert main(["lint", model_file, "--data", str(tmp_path / "data.npz"), "--json"]) == FOUND
    codes = [hazard["code"] for hazard in json.loads(capsys.readouterr().out)["hazards"]]
    assert codes == ["logits_as_probabilities", "labels_out_of_range", "nonfinite_weights"]
    ignored = ["--ignore", "logits_as_probabilities", "--ignore", "nonfinite_weights"]
    assert main(["lint", model_file, *ignored]) == CLEAN
    assert main(["lint", model_file, "--ignore", "nonsense"]) == MISUSE


def test_diagnose_names_the_ruined_layer(model_file, tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    diagnose = ["diagnose", model_file, "--data", str(tmp_path / "data.npz")]
    assert main([*diagnose, "--json"]) == FOUND
    document = json.loads(capsys.readouterr().out)
    assert "bn" in document["diagnosis"]["culprit"]
    assert main([*diagnose, "--rows", "8"]) == FOUND
    assert "In inference mode" in capsys.readouterr().out


def test_recalibrate_writes_a_repaired_model(model_file, tmp_path, capsys):
    x = np.random.default_rng(0).normal(3.0, 2.0, (50, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    output = str(tmp_path / "healed.keras")
    recalibrate = ["recalibrate", model_file, "--data", str(tmp_path / "x.npy"), "-o", output]
    assert main(recalibrate) == CLEAN
    assert "old statistics not finite" in capsys.readouterr().out
    assert main(["scan", output, "--json"]) == CLEAN
    document = json.loads(capsys.readouterr().out)
    found = {v["path"]: v["statistics"] for layer in document["layers"] for v in layer["variables"]}
    assert found["bn/moving_mean"]["mean"] == pytest.approx(x.mean(), rel=1e-4)
    assert main(recalibrate) == MISUSE
    assert "overwrite" in capsys.readouterr().err


def test_recalibrate_refuses_an_output_before_it_runs_the_data(model_file, tmp_path, capsys):
    """The new file is a `.keras` file, also that of the folder of an unzipped model."""
    with zipfile.ZipFile(model_file) as archive:
        archive.extractall(tmp_path / "model")
    np.save(tmp_path / "x.npy", np.ones((4, 4), np.float32))
    data = ["recalibrate", str(tmp_path / "model"), "--data", str(tmp_path / "x.npy")]
    assert main(data) == CLEAN
    assert (tmp_path / "model.repaired.keras").exists()
    np.save(tmp_path / "x.npy", np.full((4, 4), np.nan, np.float32))
    capsys.readouterr()
    assert main([*data, "-o", str(tmp_path / "new.h5")]) == MISUSE
    assert "an output that ends in .keras" in capsys.readouterr().err


def test_a_file_that_cannot_be_loaded_gives_one_sentence(good, tmp_path, capsys):
    """Weights without a model, pickled data, a Lambda with code: exit code 2, no code is run."""
    keras = pytest.importorskip("keras")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object))
    mark = str(tmp_path / "ran")
    evil = keras.Sequential(
        [keras.Input((1,)), keras.layers.Lambda(lambda x: __import__("os").mkdir(mark) or x)]
    )
    os.rmdir(mark)
    evil.save(tmp_path / "lambda.keras")
    for words in (
        ["lint", good],
        ["lint", str(tmp_path / "lambda.keras")],
        ["recalibrate", good, "--data", str(tmp_path / "pickled.npy")],
    ):
        assert main(words) == MISUSE
        assert capsys.readouterr().err.count("\n") == 1
    assert not os.path.exists(mark)


@pytest.mark.daily("repair --stati-*")
@pytest.mark.skipif(os.name == "nt", reason="argcomplete answers on a file descriptor of POSIX")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sc", {"scan "}),
        ("repair --weights z", {"zeros "}),
        ("repair --stati", {"--statistics", "--statistics-limit"}),
    ],
)
def test_shells_complete(typed, offered):
    """Commands, options and the choices of an option are completed by argcomplete."""
    pytest.importorskip("argcomplete")
    line = f"keras-nanguard {typed}"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
    }
    command = ["sh", "-c", f'"{sys.executable}" -m keras_nanguard 8>&1']
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **asked, "_ARC_DEBUG": ""}
    )
    assert {word.rstrip() for word in done.stdout.split("\n")} == {
        word.rstrip() for word in offered
    }, done.stderr


def test_tables_show_names_as_text_and_not_as_markup(bad, tmp_path, capsys):
    """On a terminal: a table with the worst first; square brackets in a name are not markup."""
    from rich.console import Console

    from keras_nanguard import repair, scan

    path = tmp_path / "markup.weights.h5"
    with h5py.File(path, "w") as file:
        file["[red]x[/red]/kernel"] = np.full((2, 2), np.nan)
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(scan(path))
    console.print(repair(bad, dry_run=True))
    text = console.export_text()
    assert "[red]x[/red]" in text
    assert "Dry run" in text


def test_the_runs_on_the_page_are_accepted_by_the_parser(capsys):
    runs = re.findall(r"^    keras-nanguard (.*)$", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert len(runs) >= 9
    for run in runs:
        words = [word.strip("'") for word in run.split("|")[0].split()]
        assert main([words[0], "--help"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words if word.startswith("-"))
