"""What has no effect in a policy with the model at hand is reported once, before the first step."""

from __future__ import annotations

import contextlib

import keras
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard._files.model_names import model_names as names_in_file
from keras_nanguard._fit.policy_lines import model_names
from keras_nanguard._policy.occurrence import OCCURRENCES
from keras_nanguard._policy.presets import PRESETS
from keras_nanguard._policy.settings import matches_path
from keras_nanguard.testing import inject

LATE = {"name": "late", "when": "refused", "after": {"consecutive": 20}, "do": "warn"}
EMBEDDING = {"name": "embedding", "on": "gradients", "layer": "embed*", "do": "warn"}
SCALE = {"name": "scale", "on": "loss_scale", "do": "warn"}


def said(capsys) -> list[str]:
    """Return the lines that the guard has printed of its policy."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("NanGuard: Rule")]


def model():
    """Return a small compiled model with names that do not depend on what was made before."""
    made = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="hidden"), layers.Dense(1, name="head")], name="net")
    made.compile("adam", "mse")
    return made


def test_rules_without_effect_are_reported_once(capsys):
    """One line each at the first fit: a rule that comes too late, a glob that meets nothing, a site that is not there."""
    data, net = zoo.regression(batches=2), model()
    guard = NanGuard(rules=[LATE, EMBEDDING, SCALE])
    net.fit(data.x, data.y, verbose=0, callbacks=[guard])
    lines = said(capsys)
    assert [line.split("'")[1] for line in lines] == ["late", "embedding", "scale"]
    assert "rule 'endless' ends training at 12 in a row" in lines[0]
    assert "nothing in the model 'net' matches the glob 'embed*'" in lines[1]
    assert "the model 'net' has no loss scale" in lines[2]
    net.fit(data.x, data.y, verbose=0, callbacks=[guard])
    assert said(capsys) == []


@pytest.mark.parametrize("policy", ["recover", "stop", "observe", "strict-fp16", "finetune"])
def test_a_preset_says_nothing(policy, capsys):
    """The presets are made for any model, and nothing is said of them."""
    assert policy in PRESETS
    data = zoo.regression(batches=2)
    model().fit(data.x, data.y, verbose=0, callbacks=[NanGuard(policy)])
    assert "NanGuard:" not in capsys.readouterr().out


def test_nothing_is_said_with_verbose_0(capsys):
    """`verbose=0` prints nothing, and a policy with warnings trains like any other."""
    data = zoo.regression(batches=2)
    history = model().fit(data.x, data.y, verbose=0, callbacks=[NanGuard(rules=[LATE, EMBEDDING], verbose=0)])
    assert capsys.readouterr().out == "" and len(history.history["loss"]) == 1


def test_loops_and_models_say_it_too(capsys):
    """A watched loop and a `NanGuardModel` say it as `fit` does; a model that is not built says nothing of its layers."""
    net = model()
    guard = NanGuard(rules=[LATE, EMBEDDING])
    with guard.watch(net, net.optimizer):
        assert [line.split("'")[1] for line in said(capsys)] == ["late", "embedding"]

    class Own(NanGuardModel):
        nanguard_policy = {"rules": [LATE, SCALE]}

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    own, data = Own(), zoo.regression(batches=2)
    own.compile("adam", "mse")
    own.fit(data.x, data.y, verbose=0)
    assert [line.split("'")[1] for line in said(capsys)] == ["late", "scale"]
    unbuilt = keras.Sequential([layers.Dense(1)])
    unbuilt.compile("adam", "mse")
    with guard.watch(unbuilt):
        assert said(capsys) == []


def test_what_the_guard_lacks_is_said(capsys):
    """A function that was not given and a directory that is missing are said before training, not at the first incident."""
    rule = {"name": "mine", "when": "refused", "do": ["quarantine", {"call": {"function": "notify"}}]}
    data = zoo.regression(batches=2)
    model().fit(data.x, data.y, verbose=0, callbacks=[NanGuard(rules=[rule])])
    first, second = said(capsys)
    assert "NanGuard has no directory" in first and "'notify', which is not among the functions" in second


@pytest.mark.parametrize("kind", ["float32", "mixed_float16"])
@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_file_names_what_the_model_names(tmp_path, ending, kind):
    """Every path of the live model is met in its file by the same globs, and both lack the same sites."""
    keras.config.set_dtype_policy(kind)
    encoder = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.BatchNormalization()], name="encoder")
    inputs = keras.Input((6,))
    nets = {
        "functional": keras.Model(inputs, layers.Dense(1, name="head", dtype="float32")(encoder(inputs)), name="net"),
        "plain": keras.Sequential([keras.Input((6,)), layers.Dense(1, dtype="float32")], name="plain"),
    }
    keras.config.set_dtype_policy("float32")
    for name, net in nets.items():
        net.compile("adam", "mse")
        data = zoo.regression(batches=2)
        net.fit(data.x, data.y, verbose=0)
        path = tmp_path / f"{name}{ending}"
        (net.save if ending == ".keras" else net.save_weights)(path)
        live, stored = model_names(net), names_in_file(path)
        assert stored.name == live.name == net.name
        for site in ("weights", "gradients", "statistics"):
            assert all(any(matches_path(known, path) for known in stored.paths[site]) for path in live.paths[site])
        for site, paths in stored.paths.items():
            assert (paths == ()) == (live.paths[site] == ()), site
        assert (live.paths["loss_scale"] != ()) == (kind == "mixed_float16")
        assert (live.paths["statistics"] != ()) == (name == "functional")


def test_whatever_happens_is_in_the_table():
    """Every finding of injected faults stands in the table of what can happen, with what the table says of it."""
    net = zoo.plain(dropout=False)
    data = zoo.regression(batches=60)
    heal = {"name": "heal", "on": ["state", "weights", "statistics", "slots"], "do": "rollback", "limit": {"times": 50}}
    guard = NanGuard(rules=[heal], snapshot={"every": 2}, verbose=0, diagnose=False)
    sites = ("inputs", "targets", "loss", "gradients", "weights", "statistics", "slots")
    with contextlib.ExitStack() as stack:
        for number, site in enumerate(sites):
            stack.enter_context(inject(net, site=site, kind="nan", step=8 + 7 * number, path="*" if site != "slots" else "*momentum*"))
        stack.enter_context(inject(net, site="loss", kind="spike", step=4 + 7 * len(sites), magnitude=1e9, must_happen=False))
        net.fit(data.x, data.y, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    found = [(finding, "refused" if incident.refused else "committed") for incident in guard.incidents for finding in incident.findings]
    assert {finding.site for finding, _ in found} >= {"inputs", "targets", "loss", "gradients", "state"}
    for finding, moment in found:
        rows = [one for one in OCCURRENCES if (one.site, one.kind, one.moment) == (finding.site, finding.kind, moment)]
        assert rows, (finding, moment)
        assert not finding.path or rows[0].path
        assert not (finding.nan or finding.inf) or rows[0].counts
        assert not finding.value or rows[0].value
