"""A word that a policy does not know is answered with the one that was meant."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import keras_nanguard
from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import CAUSES, KINDS, SITES
from keras_nanguard._fit.arguments import ARGUMENTS
from keras_nanguard._policy.conditions import CONDITIONS
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.presets import PRESETS
from keras_nanguard._policy.problems import MAIN_FIELD
from keras_nanguard._policy.rules import MOMENTS
from keras_nanguard._policy.spelling import SYNONYMS, nearest
from keras_nanguard.actions import ACTIONS


def answer(**sections):
    with pytest.raises(PolicyError) as caught:
        Policy.from_any("recover", **sections)
    (problem,) = caught.value.problems
    return problem


def rule(**fields):
    return answer(rules=[{"name": "mine", "do": "warn", **fields}])


@pytest.mark.parametrize(
    ("field", "said", "meant"),
    [
        *(("kind", word, "nonfinite") for word in ("nan", "NaN", "NAN", "inf", "Inf", "infinity", "overflow", "non-finite")),
        *(("on", word, "gradients") for word in ("gradient", "grad", "Gradients", "grads")),
        *(("on", word, "weights") for word in ("weight", "kernel", "params")),
        *(("on", word, "statistics") for word in ("bn", "batchnorm", "BatchNormalization", "batch_norm", "moving_mean")),
        *(("do", word, "stop") for word in ("halt", "abort", "terminate", "early_stopping")),
        *(("do", word, "lower_lr") for word in ("lr", "learning_rate", "reduce_lr", "reduce-lr", "Lower_LR")),
        *(("do", word, "raise_error") for word in ("raise", "error")),
        ("do", "restore", "rollback"),
        ("do", "bn", "reset_batchnorm"),
        ("do", "ignore", "skip"),
        ("do", "rolback", "rollback"),
        ("on", "loss-scale", "loss_scale"),
        ("when", "start", "before_training"),
        ("otherwise", "halt", "stop"),
    ],
)
def test_what_people_say_is_answered_with_the_word_that_is_meant(field, said, meant):
    """Words of the field come before the nearest spelling."""
    assert rule(**{field: said}).endswith(f"received {said!r}, did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"on": "nan"}, 'kind = "nonfinite"'),
        ({"on": "spike"}, 'kind = "spike"'),
        ({"kind": "gradients"}, 'on = "gradients"'),
        ({"kind": "bn"}, 'on = "statistics"'),
        ({"cause": "refused"}, 'when = "refused"'),
        ({"kind": "loss_domain"}, 'cause = "loss_domain"'),
    ],
)
def test_a_word_in_the_wrong_field_is_answered_with_the_right_field(fields, meant):
    """A kind under `on`, a site under `kind`: the problem says where the word belongs."""
    assert rule(**fields).endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("sections", "meant"),
    [
        ({"checkpoint": {"every": 5}}, "snapshot"),
        ({"every": 5}, "snapshot"),
        ({"loss_scale": {"patience": 3}}, "checks"),
        ({"snapshot": {"save_freq": 5}}, "every"),
        ({"snapshot": {"max_to_keep": 5}}, "keep"),
        ({"snapshot": {"storage": "RAM"}}, "memory"),
        ({"rules": [{"name": "mine", "do": "warn", "consecutive": 3}]}, "after"),
        ({"rules": [{"name": "mine", "do": "warn", "after": {"in_a_row": 3}}]}, "consecutive"),
        ({"rules": [{"name": "mine", "do": "warn", "limit": {"count": 3}}]}, "times"),
        ({"rules": [{"name": "mine", "do": {"lower_lr": {"min_learning_rate": 1e-6}}, "limit": {"times": 1}}]}, "min_lr"),
    ],
)
def test_fields_and_sections_are_answered_too(sections, meant):
    """A section, field, condition or parameter by another name is answered with its name here."""
    with pytest.raises(PolicyError) as caught:
        Policy.from_any("recover", **sections)
    assert any(problem.endswith(f"did you mean {meant!r}?") for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(("said", "meant"), [("fp16", "strict-fp16"), ("halt", "stop"), ("default", "recover"), ("longrun", "long-run")])
def test_presets_are_answered_too(said, meant):
    """A preset by another name is answered with its name here."""
    with pytest.raises(PolicyError, match=f"Did you mean '{meant}'"):
        Policy.from_any(said)


def test_every_word_that_is_suggested_is_a_word_of_policies():
    """The table holds no word that no policy knows."""
    schema = (Path(keras_nanguard.__file__).parent / "policies" / "policy.schema.json").read_text("utf-8")
    known = {*SITES, *KINDS, *CAUSES, *MOMENTS, *ACTIONS, *CONDITIONS, *PRESETS, *ARGUMENTS, *_words(json.loads(schema))}
    assert set(SYNONYMS) - known == set()


def _words(schema):
    if isinstance(schema, dict):
        found = {*schema.get("properties", {}), *(word for word in schema.get("enum", ()) if isinstance(word, str))}
        return found.union(*(_words(inner) for inner in schema.values()))
    return set().union(*(_words(inner) for inner in schema)) if isinstance(schema, list) else set()


@given(st.one_of(st.sampled_from(" ".join(SYNONYMS.values()).split()), st.text(string.ascii_letters + "-_ ", max_size=12)))
def test_a_suggestion_is_always_a_known_word(said):
    """Whatever is said: nothing, or one of the words that are known there; and nothing where the word is right."""
    for known in (SITES, KINDS, PRESETS, tuple(ACTIONS)):
        assert nearest(said, known) in ("", *known)
        assert said not in known or nearest(said, known) == ""


@pytest.mark.parametrize(
    ("sections", "meant"),
    [
        ({"snapshot": 50}, '{"every": 50}'),
        ({"checks": {"weights": 1e6}}, '{"max_abs": 1000000.0}'),
        ({"rules": {"name": "mine", "do": "warn"}}, "a list of one, [{...}]"),
        *(
            ({"rules": [{"name": "mine", "do": "warn", field: value}]}, meant)
            for field, value, meant in (
                ("limit", 3, '{"times": 3}'),
                ("after", 5, '{"consecutive": 5}'),
                ("magnitude", 7.0, '{"min_abs": 7.0}'),
                ("do", {"lower_lr": 0.5}, '{"factor": 0.5}'),
                ("do", {"call": "notify"}, '{"function": "notify"}'),
            )
        ),
    ],
)
def test_a_bare_value_is_answered_with_the_table_that_is_meant(sections, meant):
    """A number or a word where a table belongs: the problem shows the table."""
    assert answer(**sections).endswith(f", did you mean {meant}?")


@pytest.mark.parametrize("sections", [{"snapshot": -50}, {"snapshot": "often"}, {"checks": False}, {"rules": 3}])
def test_no_table_is_suggested_that_would_be_refused(sections):
    """Where the value fits no field, only what is expected is said."""
    assert "did you mean" not in answer(**sections)


def test_the_fields_that_stand_for_a_table_are_fields_of_it():
    """Each table of `MAIN_FIELD` is one of the schema, and its field is one of the table's."""
    schema = json.loads((Path(keras_nanguard.__file__).parent / "policies" / "policy.schema.json").read_text("utf-8"))
    assert all(field in schema["$defs"][table]["properties"] for table, field in MAIN_FIELD.items())
