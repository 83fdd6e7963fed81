"""Equal parts of incidents, held once: a fault that returns ten thousand times is reported in the same words each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from keras_nanguard._core.incident import Incident

__all__ = ["sharing"]

Part = TypeVar("Part")

RECENT = 8
"""How many incidents are looked at: several kinds of trouble may take turns."""


def sharing(incident: Incident, earlier: Sequence[Incident]) -> Incident:
    """Return an incident equal to this one that takes from the last ones before it the findings and sentences that they have in common."""
    known: dict[Any, Any] = {}
    for one in earlier[-RECENT:]:
        for part in _parts(one):
            known.setdefault(_key(part), part)

    def same(part: Part) -> Part:
        shared: Part = known.get(_key(part), part)
        return shared

    def each(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return same(tuple(map(same, parts)))

    diagnosis = incident.diagnosis
    if diagnosis is not None:
        diagnosis = dataclasses.replace(diagnosis, evidence=each(diagnosis.evidence), advice=each(diagnosis.advice))
    return dataclasses.replace(incident, findings=each(incident.findings), diagnosis=diagnosis)


def _parts(incident: Incident) -> Iterator[Any]:
    """Yield what incidents can have in common."""
    groups: list[tuple[Any, ...]] = [incident.findings]
    if incident.diagnosis is not None:
        groups += [incident.diagnosis.evidence, incident.diagnosis.advice]
    for group in groups:
        yield group
        yield from group


def _key(part: Any) -> Any:
    """Return what is equal for equal parts, also where there is a NaN in them."""
    if isinstance(part, tuple):
        return tuple(map(_key, part))
    return part if isinstance(part, str) else repr(part)
