"""The pages on files and on the command line say what the code does."""

import pathlib
import re

import numpy as np

from keras_nanguard._cli.parser import parser
from keras_nanguard._files.problems import CHOICES, PROBLEMS

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_programs_on_the_page_run(keras, nested, task, tmp_path, monkeypatch):
    """Every Python block of the page runs, one after the other, in a folder with a ruined and a
    good model."""
    model = nested()
    model.save(tmp_path / "good.keras")
    model.get_layer("backbone").get_layer("post_bn").moving_variance.assign(np.full(6, np.nan))
    model.save(tmp_path / "model.keras")
    monkeypatch.chdir(tmp_path)
    made = {"keras": keras, "x_train": task[0]}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "files.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, made)
    assert made["fixed"].ok


def test_every_problem_and_every_choice_stands_on_the_page():
    """The tables name each problem with its severity, and each choice of a repair."""
    text = (DOCS / "files.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for code, (severity, _) in PROBLEMS.items():
        assert any(f"`{code}`" in row and f"| {severity} |" in row for row in rows), code
    for field, choices in CHOICES.items():
        (row,) = [row for row in rows if row.startswith(f"| `{field}`")]
        assert all(f"`{choice}`" in row for choice in choices)


def test_the_runs_on_the_page_are_accepted_by_the_parser():
    """Each typical run is a command line that the parser takes."""
    runs = re.findall(r"^    keras-nanguard (.*)$", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert len(runs) >= 9
    for run in runs:
        words = [word.strip("'") for word in run.split("|")[0].split()]
        assert parser().parse_args(words).run
