"""The pages on files and on the command line agree with the code."""

import pathlib
import re

from support.public_api import listed

from keras_nanguard.__main__ import main

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_every_problem_and_every_choice_is_on_the_page():
    """The tables list each problem and each choice of a repair."""
    text = (DOCS / "files.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for code in listed("problem of a file"):
        assert any(f"`{code}`" in row for row in rows), code
    for line in listed("command repair: "):
        option, found, choices = line.removeprefix("--").partition(" of ")
        if found:
            (row,) = [row for row in rows if row.startswith(f"| `{option}`")]
            assert all(f"`{choice}`" in row for choice in choices.split(", "))


def test_the_runs_on_the_page_are_accepted_by_the_parser(capsys):
    """Each example is a command with options from its help."""
    runs = re.findall(r"^    keras-nanguard (.*)$", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert len(runs) >= 9
    for run in runs:
        words = [word.strip("'") for word in run.split("|")[0].split()]
        assert main([words[0], "--help"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words if word.startswith("-"))
