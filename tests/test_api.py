"""Everything in `tests/public_api.txt` stays, and additions to it are deliberate."""

from pathlib import Path

from support import public_api

FROZEN = Path(__file__).with_name("public_api.txt").read_text("utf-8").splitlines()


def test_nothing_has_changed():
    """Names, arguments, fields, commands, words and format numbers are those of the release."""
    changed = public_api.difference(FROZEN, public_api.lines())
    assert not changed, changed


def test_removals_are_named():
    fact = "action lower_lr: factor = 0.1"
    assert fact in FROZEN
    changed = public_api.difference(FROZEN, [line for line in FROZEN if line != fact])
    assert f"  - {fact}\n" in changed and "deprecate it first" in changed
