"""Evidence of a diagnosis from its fields by name, whatever part of it they are in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from keras_nanguard._diagnose.evidence import Evidence

PARTS = ("replay", "batch", "trials", "run")


def evidence_of(**given: Any) -> Evidence:
    """Return evidence with these fields."""
    return changed(Evidence(), **given)


def changed(known: Evidence, **given: Any) -> Evidence:
    """Return evidence with these fields in place of the old ones."""
    found = {name: value for name, value in given.items() if name not in _PLACES}
    for part in PARTS:
        own = {name: value for name, value in given.items() if _PLACES.get(name) == part}
        found[part] = replace(getattr(known, part), **own)
    return replace(known, **found)


_PLACES = {field.name: part for part in PARTS for field in fields(getattr(Evidence(), part))}
