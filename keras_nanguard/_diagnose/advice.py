"""The advice of a diagnosis, from its evidence and its conclusion. Pure functions.

The sentences are in `_core/causes.toml`, with the names of what they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from keras_nanguard._core.data import argument_path
from keras_nanguard._core.literals import CAUSE_WORDS, HINTS, LOW, NAMES_DATA
from keras_nanguard._core.observations import BACKWARD
from keras_nanguard._diagnose.causes import BECAUSE, Conclusion
from keras_nanguard._diagnose.evidence import MAX_NORM, Evidence, OptimizerFacts
from keras_nanguard._diagnose.sentences import at_rows

RAW = 100.0
"""Magnitude above which an input counts as not scaled."""


def advice(e: Evidence, conclusion: Conclusion) -> tuple[str, ...]:
    """Return the advice for a conclusion, in sentences specific to the program."""
    names, conditions, items = _names(e, conclusion), _conditions(e, conclusion), _items(e)
    sentences = []
    for entry in CAUSE_WORDS[conclusion.cause]["do"]:
        entry = {"say": entry} if isinstance(entry, str) else entry
        for item in items[entry["each"]] if "each" in entry else ({},):
            holding = {**conditions, **item}
            if all(_holds(word, holding) for word in entry.get("when", "").split()):
                text = entry["say"].format_map({**names, **item})
                sentences.append(text[0].upper() + text[1:])
    return tuple(dict.fromkeys(sentences))


def _holds(word: str, conditions: Mapping[str, Any]) -> bool:
    return bool(conditions[word.lstrip("!")]) != word.startswith("!")


def _names(e: Evidence, v: Conclusion) -> dict[str, Any]:
    """Return what the braces in the sentences stand for."""
    arrays = (*e.batch.inputs_bad, *e.batch.targets_bad)
    data = dict.fromkeys(repr(argument_path(part.name)) for part in arrays)
    culprit, hint, one = _culprit(e, v), _hint(e), len(v.samples) == 1
    rate = e.optimizers[0].learning_rate if e.optimizers else None
    return {
        "culprit": culprit,
        "layer_class": e.replay.origin.layer_class,
        "data": " and ".join(data) if len(data) > 1 else culprit,
        "rows": at_rows(v.samples),
        "them": "it" if one else "them",
        "their": "its" if one else "their",
        "hint": f": {hint}" if hint else ".",
        "tenth": "a tenth of it" if rate is None else f"{rate * 0.1:.1g}",
        "constraint": e.constraint,
    }


def _items(e: Evidence) -> dict[str, list[dict[str, Any]]]:
    """Return what a sentence is repeated for: the names and conditions of each."""
    return {
        "optimizers": [_about(optimizer) for optimizer in e.optimizers],
        "raw_inputs": _raw_inputs(e),
        "columns": _whole_columns(e),
    }


def _conditions(e: Evidence, v: Conclusion) -> dict[str, bool]:
    """Return which conditions hold; the observation that decided is one of them."""
    origin, optimizers = e.replay.origin, e.optimizers
    untrained = not e.growth.steps and origin.phase == "forward"
    low = origin.dtype if origin.dtype in LOW else e.low_precision
    return {
        **{word: word == v.because for word in BECAUSE},
        "hinted": bool(_hint(e)),
        "large": e.mechanism in ("exp", "overflow"),
        "cured": bool(v.samples) and e.trials.without_rows == "finite",
        "regularizer": origin.phase == "regularizer",
        "constants": any(part.constant for part in e.batch.inputs),
        "bfloat16": low == "bfloat16",
        "scaled": any(o.scaled for o in optimizers),
        "clips": any(o.clips for o in optimizers),
        "steep": not e.gradient_norm < MAX_NORM,
        "own": any(o.own for o in optimizers),
        "epsilons": all(o.epsilon is None or o.epsilon_in_dtype for o in optimizers),
        "untrained": v.because == "recurrence" and untrained,
    }


def _culprit(e: Evidence, v: Conclusion) -> str:
    """Return the culprit as the advice names it."""
    layer_class = e.replay.origin.layer_class
    nobody = CAUSE_WORDS[v.cause].get("thing", "")
    if v.cause == "loss_domain" and e.replay.origin.phase == "regularizer":
        nobody = "the layer"
    shown = argument_path(v.culprit) if v.cause in NAMES_DATA else v.culprit
    name = repr(shown) if shown else nobody
    if v.cause == "gradient_domain" and layer_class.startswith("regularizer "):
        return f"the {layer_class} of {name}"
    return name


def _about(o: OptimizerFacts) -> dict[str, Any]:
    """Return the advice about one optimizer."""
    return {
        **asdict(o),
        "centered": bool(o.settings.get("centered")),
        "broken": o.rate_is_bad,
        "half": o.dtype == "float16",
        "no_epsilon": o.epsilon is not None and not o.epsilon_in_dtype,
    }


def _whole_columns(e: Evidence) -> list[dict[str, Any]]:
    """Return the columns of the inputs that are bad in every row."""
    parts = (p for p in e.batch.inputs_bad if p.column is not None and len(p.rows) == e.batch.count)
    return [{"name": repr(argument_path(part.name)), "column": part.column} for part in parts]


def _raw_inputs(e: Evidence) -> list[dict[str, Any]]:
    """Return the inputs that have to be scaled for any network."""
    raw = [part for part in e.batch.inputs if not part.integer and part.max_abs >= RAW]
    return [{**asdict(part), "name": repr(argument_path(part.name))} for part in raw]


def _hint(e: Evidence) -> str:
    """Return the advice for the operation that produced the bad value, or for its layer."""
    op, own = e.replay.origin.op, HINTS.get(e.replay.origin.op, "")
    overflowed = op == "Mul" and e.mechanism == "overflow"  # not 0 times Inf
    not_written = e.replay.origin.phase in BACKWARD and not op.endswith("Grad")  # by the user
    if overflowed or not_written:
        own = ""
    return own or HINTS.get(e.replay.origin.layer_class, "")
