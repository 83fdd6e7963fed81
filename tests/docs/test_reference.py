"""The reference agrees with the code."""

import inspect
from pathlib import Path

import pytest
from support.docs_tools import load

import keras_nanguard

ROOT = Path(__file__).parents[2]
reference_pages = load("reference_pages")


@pytest.mark.parametrize("path", reference_pages.WRITTEN, ids=lambda path: path.name)
def test_generated_pages(path):
    """`python docs/reference_pages.py` was run."""
    assert path.read_text(encoding="utf-8") == reference_pages.WRITTEN[path]()


def test_every_public_name_is_in_the_api_page():
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in keras_nanguard.__all__ if name[0] != "_" and f"keras_nanguard.{name}\n" not in page]
    errors = [name for name in missing if name.endswith("Error")]
    assert sorted(set(missing) - set(errors)) == []
    assert "automodule:: keras_nanguard.errors" in page


@pytest.mark.parametrize("name", [name for name in keras_nanguard.__all__ if name[0] != "_"])
def test_help(name):
    """A sentence about every public name, each argument, and each public method."""
    public = getattr(keras_nanguard, name)
    text = inspect.getdoc(public) or ""
    assert text.splitlines()[0].endswith("."), text
    if inspect.isfunction(public):
        documented = text
        assert all(argument in documented for argument in inspect.signature(public).parameters)
    for method, value in vars(public).items() if inspect.isclass(public) else ():
        if method[0] != "_" and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(public, method)), f"{name}.{method}"


def test_help_of_the_guard():
    """Every argument of `NanGuard` is in its help."""
    text = inspect.getdoc(keras_nanguard.NanGuard)
    for argument in inspect.signature(keras_nanguard.NanGuard).parameters:
        assert f"{argument}:" in text or f"**{argument}:" in text
