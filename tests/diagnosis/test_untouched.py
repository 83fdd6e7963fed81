"""A diagnosis has no side effects: state, seeds and generators are unchanged in every mode."""

from __future__ import annotations

import random

import keras
import mechanisms
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard, diagnose
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._diagnose.explain_step import Explainer

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
    inputs = keras.Input((6, 4))
    h = layers.LSTM(8, dropout=0.2)(inputs)
    h = layers.GaussianNoise(0.1)(layers.Dropout(0.3)(layers.BatchNormalization()(h)))
    model = keras.Model(inputs, layers.Dense(1)(h))
    model.compile(keras.optimizers.Adam(1e-2, use_ema=True), "mse", metrics=["mae"], **compile_)
    x = np.random.default_rng(0).standard_normal((80, 6, 4)).astype("float32")
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


@pytest.mark.requires_backend("tensorflow", reason="its train step is written with tf.GradientTape")
def test_a_replay_restores_what_a_step_of_ones_own_writes():
    case = mechanisms.PROGRAMS["bad_row_in_a_step_that_writes_its_weights"](False)
    model = case.model
    model.fit(case.x, case.y, batch_size=8, verbose=0)
    before = [keras.ops.convert_to_numpy(v.value).copy() for v in (*model.variables, *model.optimizer.variables)]
    step = ReplayableStep(model.train_step, model, [model.optimizer], keeps_undo=True)
    run = step.run(((keras.ops.convert_to_tensor(case.x[:8]), keras.ops.convert_to_tensor(case.y[:8])),), observe=True, update=True)
    assert run.finite
    after = [keras.ops.convert_to_numpy(v.value) for v in (*model.variables, *model.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after))
    assert "call" not in vars(model.layers[-1])


def test_an_observed_run_gives_the_numbers_of_a_plain_one():
    case = mechanisms.PROGRAMS["nan_row_where_batchnorm_mixes_rows"](False)
    case.model.fit(case.x, case.y, batch_size=8, verbose=0)
    step = ReplayableStep.of(case.model, [case.model.optimizer])
    args = ((keras.ops.convert_to_tensor(case.x[:8]), keras.ops.convert_to_tensor(case.y[:8])),)
    plain, observed = step.run(args), step.run(args, observe=True)
    assert observed.loss == pytest.approx(plain.loss, rel=1e-6)
    assert observed.norm == pytest.approx(plain.norm, rel=1e-6)
    assert [row.path for row in observed.rows][:2] == ["sequential/conv", "sequential/bn"]


def test_examining_a_model_changes_nothing():
    case = mechanisms.PROGRAMS["nan_row_where_batchnorm_mixes_rows"](True)
    model = case.model
    before = [keras.ops.convert_to_numpy(v.value).copy() for v in model.variables]
    assert diagnose(model, case.x[24:32], case.y[24:32]).diagnosis.cause == "input_nonfinite"
    assert all(np.array_equal(a, keras.ops.convert_to_numpy(v.value)) for a, v in zip(before, model.variables))


def test_a_diagnosis_that_fails_becomes_evidence(monkeypatch):
    monkeypatch.setattr("keras_nanguard._diagnose.explain_step.gather", lambda *args: 1 / 0)
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](True)
    guard = NanGuard(verbose=0)
    case.model.fit(case.x, case.y, batch_size=8, verbose=0, shuffle=False, callbacks=[guard])
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "unknown"
    assert "ZeroDivisionError" in incident.diagnosis.evidence[0]


def test_a_streak_is_diagnosed_a_few_times_only(monkeypatch):
    full = []
    real = Explainer._explained
    monkeypatch.setattr(Explainer, "_explained", lambda self, *a: full.append(real(self, *a)) or full[-1])
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](False)
    case.x[16:] = np.nan
    guard = NanGuard(verbose=0)
    case.model.fit(case.x, case.y, batch_size=8, verbose=0, shuffle=False, callbacks=[guard])
    notes = [d.evidence[0].startswith("Reused") for d in full]
    assert notes[:5] == [False, False, False, True, True]
    assert all(d.cause == "input_nonfinite" and d.samples == tuple(range(8)) for d in full)


def test_a_diagnosis_is_taken_over_for_the_same_findings_only(monkeypatch):
    """Outputs that are NaN with and without NaN in the inputs are two kinds of trouble, however often one was diagnosed."""
    causes = iter([*["float16_overflow"] * 3, "input_nonfinite"])
    monkeypatch.setattr("keras_nanguard._diagnose.explain_step.gather", lambda *args: None)
    monkeypatch.setattr("keras_nanguard._diagnose.explain_step.raised.by_replay", lambda *args: None)
    monkeypatch.setattr("keras_nanguard._diagnose.explain_step.conclude", lambda evidence: Diagnosis(next(causes)))
    explain, session = Explainer(), type("Session", (), {"model": None})
    outputs, inputs = Finding("outputs", path="output_0"), Finding("inputs", path="x")
    each = [*[(outputs,)] * 5, (inputs, outputs)]
    reported = [explain(session, Incident(step, 0, step, findings), None).cause for step, findings in enumerate(each)]
    assert reported == [*["float16_overflow"] * 5, "input_nonfinite"]


class Alternating(keras.Model):
    """Every third step counts three times: its own `train_step` counts in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.dense, self.turn = layers.Dense(1), 0

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, *args, **given):
        self.turn = (self.turn + 1) % 3
        return super().compute_loss(*args, **given) * (1.0 if self.turn else 3.0)


@pytest.mark.requires_backend("tensorflow", "torch", reason="an eager step reads the attribute each time")
def test_a_replay_restores_the_counter_of_a_step_of_ones_own():
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
