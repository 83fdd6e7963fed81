"""Parts of a policy without effect on the model are reported once, before the first step."""

import json

import keras
import pytest
from keras import layers
from support import zoo
from support.command_line import main

from keras_nanguard import NanGuard, NanGuardModel

LATE = {"name": "late", "site": "loss", "after": 20, "do": "stop"}
EMBEDDING = {"name": "embedding", "site": "gradients", "layer": "embed*", "do": "warn"}


def said(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("NanGuard: Rule")]


def model():
    """Return a small compiled model whose names do not depend on earlier models."""
    made = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="hidden"), layers.Dense(1, name="head")], name="net")
    made.compile("adam", "mse")
    return made


def fit(guard, net=None):
    data = zoo.regression(batches=2)
    return (net or model()).fit(data.x, data.y, verbose=0, callbacks=[guard])


def test_rules_without_effect_are_reported_once(capsys):
    """One line each at the first fit: a rule that never becomes due, and a glob without a match."""
    net, guard = model(), NanGuard(rules=[LATE, EMBEDDING])
    fit(guard, net)
    lines = said(capsys)
    assert [line.split("'")[1] for line in lines] == ["late", "embedding"]
    assert "training ends at max_consecutive_refused = 12" in lines[0]
    assert "nothing in the model 'net' matches the glob 'embed*'" in lines[1]
    fit(guard, net)
    assert said(capsys) == []


@pytest.mark.parametrize("policy", ["recover", "stop", "observe", "tune"])
def test_a_preset_has_no_warnings(policy, capsys):
    fit(NanGuard(policy))
    assert "NanGuard:" not in capsys.readouterr().out


def test_nothing_is_printed_with_verbose_0(capsys):
    """`verbose=0` prints nothing, and a policy with warnings trains like any other."""
    history = fit(NanGuard(rules=[LATE, EMBEDDING], verbose=0))
    assert capsys.readouterr().out == "" and len(history.history["loss"]) == 1


def test_loops_and_models_say_it_too(capsys):
    """A watched loop and a `NanGuardModel` as `fit`; none about layers of an unbuilt model."""
    net = model()
    guard = NanGuard(rules=[LATE, EMBEDDING])
    with guard.watch(net, net.optimizer):
        assert [line.split("'")[1] for line in said(capsys)] == ["late", "embedding"]

    class Own(NanGuardModel):
        nanguard_policy = {"rules": [LATE]}

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    own, data = Own(), zoo.regression(batches=2)
    own.compile("adam", "mse")
    own.fit(data.x, data.y, verbose=0)
    assert [line.split("'")[1] for line in said(capsys)] == ["late"]
    unbuilt = keras.Sequential([layers.Dense(1)])
    unbuilt.compile("adam", "mse")
    with guard.watch(unbuilt):
        assert said(capsys) == []


@pytest.mark.parametrize("kind", ["float32", "mixed_float16"])
@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_file_and_its_model_have_the_same_names(tmp_path, ending, kind, capsys):
    """The same globs match every path of the live model in its file."""
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
        paths = sorted({str(v.path) for v in net.weights})
        rules = [{"name": one, "layer": one, "do": "warn"} for one in paths]
        (tmp_path / "policy.json").write_text(json.dumps({"version": 2, "rules": rules}))
        assert main(["check-policy", str(tmp_path / "policy.json"), "--model", str(path)]) != 2
        assert "nothing in the model" not in capsys.readouterr().out
