"""Evidence of a diagnosis from its fields by name, whatever part of it they are in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from keras_nanguard._core.incident import Incident
from keras_nanguard._diagnose.evidence import Evidence

PARTS = ("replay", "batch", "trials")
OF_INCIDENT = ("step", "refused", "findings")
MEASURED = ("gradient_norm", "loss_scale")

NOTHING = Evidence(Incident(0, 0, 0, ()))


def evidence_of(**given: Any) -> Evidence:
    """Return evidence with these fields."""
    return changed(NOTHING, **given)


def changed(known: Evidence, **given: Any) -> Evidence:
    """Return evidence with these fields in place of the old ones."""
    found = {name: value for name, value in given.items() if name not in _PLACES}
    for part in PARTS:
        own = {name: value for name, value in given.items() if _PLACES.get(name) == part}
        found[part] = replace(getattr(known, part), **own)
    about = {name: given[name] for name in OF_INCIDENT if name in given}
    values = {name: given[name] for name in MEASURED if given.get(name) is not None}
    incident = known.incident
    return replace(known, **found, incident=replace(incident, **about, values={**incident.values, **values}))


_PLACES = {field.name: part for part in PARTS for field in fields(getattr(NOTHING, part))}
_PLACES |= dict.fromkeys((*OF_INCIDENT, *MEASURED), "incident")
