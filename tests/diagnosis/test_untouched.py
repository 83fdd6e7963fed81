"""A diagnosis has no side effects: state, seeds and generators are unchanged in every mode."""

import json
import random
from pathlib import Path

import keras
import mechanisms
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard, diagnose
from keras_nanguard._diagnose import explainer

MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "many": {"steps_per_execution": 4},
}


if keras.backend.backend() == "torch":
    MODES = {"eager": {"jit_compile": False}}


def troubled_fit(diagnosed: bool, **compile_):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((2, 4))
    h = layers.SimpleRNN(8, dropout=0.2)(inputs)
    h = layers.GaussianNoise(0.1)(layers.Dropout(0.3)(layers.BatchNormalization()(h)))
    model = keras.Model(inputs, layers.Dense(1)(h))
    model.compile(keras.optimizers.Adam(1e-2, use_ema=True), "mse", metrics=["mae"], **compile_)
    x = np.random.default_rng(0).standard_normal((80, 2, 4)).astype("float32")
    y = x[:, 0, :1].copy()
    x[21] = np.nan
    y[37] = 1e30
    guard = NanGuard(verbose=0, diagnose=diagnosed)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[guard]).history
    state = [keras.ops.convert_to_numpy(v.value).copy() for v in (*model.variables, *model.optimizer.variables)]
    return state, history, random.random(), np.random.rand(), guard


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.slow] if mode == "xla" else []) for mode in MODES]
)
def test_training_with_a_diagnosis_is_training_without_one(mode):
    with_, without = (troubled_fit(diagnosed, **MODES[mode]) for diagnosed in (True, False))
    assert all(np.array_equal(a, b) for a, b in zip(with_[0], without[0]))
    assert with_[1:4] == without[1:4]
    assert len(with_[4].incidents) == len(without[4].incidents) >= 4
    assert {i.diagnosis.cause for i in with_[4].incidents} == {"input_nonfinite", "input_scale"}


def test_examining_a_model_changes_nothing():
    case = mechanisms.PROGRAMS["nan_row_where_batchnorm_mixes_rows"](True)
    model = case.model
    before = [keras.ops.convert_to_numpy(v.value).copy() for v in model.variables]
    assert diagnose(model, case.x[24:32], case.y[24:32]).diagnosis.cause == "input_nonfinite"
    assert all(np.array_equal(a, keras.ops.convert_to_numpy(v.value)) for a, v in zip(before, model.variables))


def test_a_diagnosis_that_fails_becomes_evidence_without_that_of_an_earlier_one(monkeypatch, tmp_path):
    gather, asked = explainer.gather, []

    def gathers_once(*args):
        asked.append(args)
        return gather(*args) if len(asked) == 1 else 1 / 0

    monkeypatch.setattr(explainer, "gather", gathers_once)
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](False)
    case.x[[21, 37]] = np.nan
    guard = NanGuard(verbose=0, directory=tmp_path)
    failed = case.train(guard)[1].diagnosis
    assert failed.cause == "unknown" and "ZeroDivisionError" in failed.evidence[0]
    folders = [Path(incident.bundle) for incident in guard.incidents]
    tables = [(folder / "layers.txt").read_text().splitlines() for folder in folders]
    losses = [json.loads((folder / "bundle.json").read_text())["growth"]["losses"] for folder in folders]
    assert [len(table) > 1 for table in tables] == [bool(found) for found in losses] == [True, False]


def test_a_streak_is_diagnosed_a_few_times_only():
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](False)
    case.x[16:] = np.nan
    found = [incident.diagnosis for incident in case.train(NanGuard(verbose=0))]
    notes = [diagnosis.evidence[0].startswith("Reused") for diagnosis in found]
    assert notes[:5] == [False, False, False, True, True]
    assert all(d.cause == "input_nonfinite" and d.samples == tuple(range(8)) for d in found)


def test_a_reused_diagnosis_names_the_rows_of_its_own_batch():
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](False)
    case.x[np.arange(16, 64, 8) + np.arange(6), 1] = np.nan  # a later row in each batch
    found = [incident.diagnosis for incident in case.train(NanGuard(verbose=0))]
    assert found[4].evidence[0].startswith("Reused")
    for row, diagnosis in enumerate(found):
        named = {text for text in diagnosis.evidence if "row at index" in text}
        assert diagnosis.samples == (row,)
        assert named and all(f"the row at index {row}" in text for text in named), named


@pytest.mark.requires_backend("tensorflow", reason="its train step is written with tf.GradientTape")
def test_a_replay_restores_the_writes_of_a_custom_step():
    states = []
    for diagnosed in (True, False):
        case = mechanisms.PROGRAMS["bad_row_in_a_step_that_writes_its_weights"](True)
        assert case.train(NanGuard(verbose=0, diagnose=diagnosed))
        variables = (*case.model.variables, *case.model.optimizer.variables)
        states.append([keras.ops.convert_to_numpy(v.value).copy() for v in variables])
    assert all(np.array_equal(a, b) for a, b in zip(*states, strict=True))


class Alternating(keras.Model):
    """Every third step counts three times: a custom `train_step` counts in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.dense, self.turn = layers.Dense(1), 0

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, *args, **given):
        self.turn = (self.turn + 1) % 3
        return super().compute_loss(*args, **given) * (1.0 if self.turn else 3.0)


@pytest.mark.requires_backend("tensorflow", "torch", reason="an eager step reads the attribute each time")
def test_a_replay_restores_the_counter_of_a_custom_step():
    def trained(diagnosed):
        keras.utils.set_random_seed(0)
        model = Alternating()
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
        x = np.random.default_rng(0).standard_normal((80, 4)).astype("float32")
        y = x[:, :1].copy()
        x[21] = np.nan
        guard = NanGuard(verbose=0, diagnose=diagnosed)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
        assert [i.step for i in guard.incidents] == [2]
        return model.turn, model.get_weights()

    (turn, weights), (other_turn, others) = trained(True), trained(False)
    assert turn == other_turn
    assert all(np.array_equal(a, b) for a, b in zip(weights, others))
