"""Snapshots: a ring of verified states, in memory or on disk, that is intact at every moment."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import GuardError, NanGuard, Policy
from keras_nanguard._core import atomic_files
from keras_nanguard._core.history import Level
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.resume import find
from keras_nanguard._fit.snapshot_files import read, save, written
from keras_nanguard._fit.snapshots import UNKNOWN, Ring, Snapshot
from keras_nanguard._fit.steps import Time
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

DISK = {"storage": "disk", "every": 5, "verify_after": 2}


def variable(*values):
    return keras.Variable(np.array(values or (0.0, 0.0), "float32"), trainable=False)


def state(*variables):
    return TrainState(variables, (), (), (), (), (), ())


def accepts(variable, value):
    return True


class TestRing:
    def test_good_state_survives(self):
        """For any number of snapshots that are never verified, the last verified one is kept."""
        ring, v = Ring(2, 5, Agreement().any_of), variable()
        ring.take(Snapshot(Time(0, 0, 0, 0), verified=True), state(v), accepts)
        for step in range(1, 50):
            v.assign([step, step])
            ring.take(Snapshot(Time(step, 0, 0, step)), state(v), accepts)
        assert ring.newest().step == 0 and len(ring.snapshots) == 3
        np.testing.assert_array_equal(ring.newest().value(v), [0.0, 0.0])

    def test_short_memory(self, room):
        """Without free memory a copy replaces another one; with some, `keep` applies again."""
        ring, v, kept = Ring(3, 0, Agreement().any_of), variable(), []
        for step in range(1, 8):
            room(0 if step in (3, 4) else np.inf)
            assert not ring.take(Snapshot(Time(step, step, 0, step)), state(v), accepts)
            kept.append([s.step for s in ring.snapshots])
        assert kept == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7]]

    def test_before_onset_past_a_damaged_one(self):
        """It is never a later one; the damaged one is forgotten."""
        ring = Ring(4, 0, Agreement().any_of)
        ring.snapshots = [Snapshot(Time(step, step, 0, step), verified=True) for step in (5, 10, 20)]
        ring.snapshots[1].is_whole = lambda: False
        assert ring.choose(12, lambda snapshot: True, np.inf).step == 5
        assert [s.step for s in ring.snapshots] == [5, 20]
        assert ring.choose(2, lambda snapshot: True, np.inf).step == 20

    def test_constant_start_takes_no_memory(self):
        """Slots that start as zeros are stored as one number, and restored completely."""
        ring, slots, weights = Ring(2, 0, Agreement().any_of), variable(*[0.0] * 1000), variable(*range(1000))
        ring.take(Snapshot(Time(0, 0, 0, 0), verified=True), state(slots, weights), accepts)
        assert ring.start.arrays[id(slots)].base.nbytes == 4
        slots.assign(np.ones(1000))
        weights.assign(np.ones(1000))
        ring.start.write([slots, weights])
        assert not np.asarray(slots).any() and np.asarray(weights)[-1] == 999

    def test_each_value_is_read_once(self, monkeypatch, room):
        """Each read is a copy from an accelerator, and an exchange between processes."""
        read, real = [], keras_variables.view
        monkeypatch.setattr(keras_variables, "view", lambda v: (read.append(v), real(v))[1])
        for free in (np.inf, 0):
            room(free)
            ring, weights, slots = Ring(2, 0, Agreement().any_of), variable(1.0, 2.0), variable(3.0, 4.0)
            read.clear()
            assert ring.take(Snapshot(Time(5, 5, 0, 5)), state(weights, slots), accepts) == ("" if free else "memory")
            assert read == [weights, slots]
        assert ring.newest() is None


class TestLeastLoss:
    """In a run that slowly gets worse, the state with the lowest loss is kept as well."""

    @staticmethod
    def kept(*levels):
        ring, v = Ring(2, 0, Agreement().any_of), variable(1.0)
        ring.take(Snapshot(Time(0, 0, 0, 0), verified=True), state(v), accepts)
        for step, level in enumerate(levels, 1):
            found = UNKNOWN if level is None else Level(step, level, 0.1)
            ring.take(Snapshot(Time(10 * step, 10 * step, 0, 0), level=found), state(v), accepts)
        return [s.step for s in ring.snapshots]

    @pytest.mark.parametrize(
        ("levels", "steps"),
        [
            pytest.param((5, 4, 3, 2, 1), [0, 40, 50], id="falling"),
            pytest.param((3, 1, 2, 3, 4, 5), [0, 20, 50, 60], id="rising"),
            pytest.param((3, 1, 2, 3, 1), [0, 40, 50], id="as low again"),
            pytest.param((3, 1, 1.1, 1.1, 1.1), [0, 40, 50], id="no clear difference"),
            pytest.param((None, None, None, None), [0, 30, 40], id="unknown"),
            pytest.param((-1, -2, -1, 0, 1), [0, 20, 40, 50], id="signed"),
        ],
    )
    def test_which(self, levels, steps):
        assert self.kept(*levels) == steps


def stateful():
    """A model with every kind of state: seeds, states of a stateful RNN, statistics, slots, a loss scale, metrics."""
    body = [layers.SimpleRNN(3, stateful=True, unroll=True), layers.BatchNormalization()]
    body += [layers.Dropout(0.2), layers.Dense(1)]
    model = keras.Sequential([keras.Input((2, 3), batch_size=8), *body])
    rate = keras.optimizers.schedules.CosineDecay(0.01, 100)
    inner = keras.optimizers.SGD(rate, momentum=0.9, use_ema=True)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=7)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def sequences():
    return zoo.Data(zoo.draw(features=6, batches=12).reshape(-1, 2, 3), zoo.regression().y)


class Cut(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def interrupted(build, data, guard, steps, **fit):
    with pytest.raises(KeyboardInterrupt):
        zoo.run(build, data, guard=guard, epochs=3, callbacks=[Cut(steps)], **fit)
    keras.backend.clear_session()


def on_disk(directory, policy="recover", resume=False, **sections):
    return NanGuard(
        policy, verbose=0, diagnose=False, directory=directory, resume=resume, snapshot={**DISK, **sections.pop("snapshot", {})}, **sections
    )


RESUMED = {
    "graph": (zoo.plain, zoo.regression, 29),
    "every kind of state": (stateful, sequences, 29),
    "graph, at the end of an epoch": (zoo.plain, zoo.regression, 27),
    "steps2": (lambda: zoo.plain(steps_per_execution=2), zoo.regression, 13),
    "unbuilt": (lambda: _compiled(keras.Sequential(_parts())), zoo.regression, 29),
}


def _parts():
    return [layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]


def _compiled(model):
    model.compile("adam", "mse", metrics=["mae"])
    return model


class TestResume:
    @pytest.mark.daily("every kind of state", "steps2", "unbuilt")
    @pytest.mark.parametrize("case", RESUMED)
    def test_bit_identical(self, case, tmp_path):
        """A run that is resumed in a new model ends as an uninterrupted one."""
        if case == "every kind of state" and zoo.BACKEND != "tensorflow":
            pytest.skip("Keras cannot train a stateful recurrent layer on torch, and hands its state to no step on JAX")
        if case == "graph, at the end of an epoch" and zoo.BACKEND == "torch":
            pytest.skip("on torch Keras also draws from the generator between two epochs, so dropout continues with other numbers")
        build, data, cut = RESUMED[case]
        # under XLA a guarded step is another program than a plain one, and may round otherwise: tests/transaction compares those
        whole = zoo.run(build, data(), epochs=3, guard="undiagnosed" if zoo.BACKEND == "jax" else None)
        every = {"graph, at the end of an epoch": 12, "steps2": 4}.get(case, 5)
        interrupted(build, data(), on_disk(tmp_path, snapshot={"every": every}), cut)
        guard = on_disk(tmp_path, resume=True, snapshot={"every": every})

        def other():
            keras.utils.set_random_seed(77)
            return build()

        resumed = zoo.run(other, data(), guard=guard, epochs=3)
        for (path, one), (_, other) in zip(resumed.state, whole.state, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=path)
        for name, values in zoo.plain_logs(resumed.history).items():
            assert values == whole.history[name][-len(values) :]
        assert resumed.model._initial_epoch is None

    def test_in_the_middle_of_an_execution(self, tmp_path):
        """The new run has more steps in each: it trains on the batches that are left of the first one."""
        zoo.supported({"steps_per_execution": 4})
        whole = zoo.run(zoo.plain, zoo.regression(), epochs=3)
        interrupted(zoo.plain, zoo.regression(), on_disk(tmp_path, snapshot={"every": 5}), 29)
        guard = on_disk(tmp_path, resume=True)
        resumed = zoo.run(lambda: zoo.plain(steps_per_execution=4), zoo.regression(), guard=guard, epochs=3)
        zoo.assert_same(*([array for _, array in run.state] for run in (resumed, whole)), tolerance=1e-6)

    def test_the_policy_state_is_restored(self, tmp_path):
        """Budgets, rates, clipping and bounds continue from the last incident, not snapshot."""
        do = [{"lower_lr": {"factor": 0.1, "recover_after": 50}}, {"clip": {"global_clipnorm": 3.0}}, "fix_loss_scale"]
        policy = {"rules": [{"name": "act", "do": do}], "action_budget": 2, "loss_scale": {"floor": 2.0}}

        def build():
            inner = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.01, 100))
            return zoo.plain(keras.optimizers.LossScaleOptimizer(inner))

        data = zoo.poison(zoo.regression(), 7)
        first = on_disk(tmp_path, policy)
        interrupted(build, data, first, 9)
        second = on_disk(tmp_path, policy, resume=True)
        seen = {}
        model = build()

        def look(batch, logs):
            inner = model.optimizer.inner_optimizer
            rate = second.session.run.recovery.rate(model.optimizer)
            bounds = second.session.run.recovery.scale_bounds
            seen.setdefault(batch, (round(rate.factor, 6), inner.global_clipnorm, bounds))

        guard_end = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        zoo.run(lambda: model, data, guard=second, epochs=2, callbacks=[guard_end])
        assert seen[6] == (0.1, 3.0, (2.0, 2.0**32)) and seen[8] == (0.01, 1.5, (2.0, 2.0**32))
        reported = [[o.status for o in i.outcomes if o.action == "lower_lr"] for i in second.incidents]
        assert reported == [["done"], []], "the second time in all was the last that the limit allows"
        assert model.optimizer.inner_optimizer.global_clipnorm is None

    @pytest.mark.daily("graph")
    @pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the model has no weights before a step")
    @pytest.mark.parametrize("mode", ["graph", "xla"])
    def test_a_resumed_run_clips(self, mode, tmp_path):
        """Also if the step was compiled before the setting is known. The oracle is the norm of each update."""
        policy = {"rules": [{"name": "act", "do": [{"clip": {"global_clipnorm": 1e-3, "min_clipnorm": 1e-3}}]}]}

        def build():
            return zoo.plain(keras.optimizers.SGD(1.0), metrics=(), **zoo.MODES[mode])

        data = zoo.poison(zoo.regression(), 7)
        interrupted(build, data, on_disk(tmp_path, policy), 9)
        model, weights = build(), []

        def note(batch, logs=None):
            weights.append(np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]))

        noted = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
        zoo.run(lambda: model, data, guard=on_disk(tmp_path, policy, resume=True), epochs=1, callbacks=[noted])
        assert len(weights) > 3
        assert max(np.linalg.norm(b - a) for a, b in itertools.pairwise(weights)) < 1.01e-3

    def test_same_budget_in_the_next_fit(self):
        """A second fit keeps budgets and factors; the third exceeds the budget, which ends it."""
        policy = {"rules": [{"name": "act", "do": "lower_lr"}], "action_budget": 2}
        guard = NanGuard(policy, verbose=0, diagnose=False)
        schedule = keras.optimizers.schedules.CosineDecay(0.01, 1000)
        model = zoo.plain(keras.optimizers.SGD(schedule), run_eagerly=True)
        data, factors = zoo.poison(zoo.regression(), 3), []
        for _ in range(3):
            model.fit(data.x, data.y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
            factors.append(round(guard.session.guard_state.rates[0].factor, 6))
        assert factors == [0.1, 0.01, 1.0] and model.stop_training, "an end restores the rate"
        assert len(guard.incidents) == 3

    def test_nothing_there(self, tmp_path):
        """Without a snapshot a run starts from scratch; the next fit is a separate run."""
        guard = on_disk(tmp_path, resume=True)
        first = zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=1)
        assert first.guard.session.run.step == 12
        again = zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=1)
        assert again.guard.session.run.step == 12

    def test_another_model(self, tmp_path):
        interrupted(zoo.plain, zoo.regression(), on_disk(tmp_path), 9)
        other = lambda: _compiled(keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(1)]))  # noqa: E731
        with pytest.raises(GuardError, match="another model"):
            zoo.run(other, zoo.regression(), guard=on_disk(tmp_path, resume=True))

    @pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX a step receives the state")
    def test_another_model_without_an_optimizer(self, tmp_path):
        """That it was not built does not follow: the run does not start from scratch."""

        class Own(keras.Sequential):
            def train_step(self, data):
                return {"loss": keras.ops.mean(self(data[0]))}

        def build(units=4):
            model = Own([keras.Input((6,)), layers.Dense(units)])
            model.compile(None)
            return model

        interrupted(build, zoo.regression(), on_disk(tmp_path), 9)
        with pytest.raises(GuardError, match="another model"):
            zoo.run(lambda: build(3), zoo.regression(), guard=on_disk(tmp_path, resume=True))

    @pytest.mark.parametrize("fails", ["a file", "the model", "the data"])
    def test_another_try_after_an_error(self, fails, tmp_path):
        """What has not been restored is neither forgotten nor removed: the next fit resumes from it."""
        interrupted(zoo.plain, zoo.regression(), on_disk(tmp_path, snapshot={"keep": 1}), 9)
        guard, model, data = on_disk(tmp_path, resume=True, snapshot={"keep": 1}), zoo.plain(), zoo.regression()
        (path,) = written(tmp_path / "snapshots")
        if fails == "a file":
            (path / "state.npz").rename(tmp_path / "away")
            with pytest.raises(GuardError, match="can be used"), pytest.warns(UserWarning, match="older snapshot"):
                zoo.fit(model, data, guard)
            (tmp_path / "away").rename(path / "state.npz")
        elif fails == "the model":
            other = _compiled(keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(1)]))
            with pytest.raises(GuardError, match="another model"):
                zoo.fit(other, data, guard)
        else:
            with pytest.raises(ZeroDivisionError):
                zoo.fit(model, data, guard, keras.callbacks.LambdaCallback(on_train_begin=lambda logs: 1 / 0))
        zoo.fit(model, data, guard, epochs=2)
        assert guard.session.run.step == 24 - 5
        zoo.fit(model, data, guard)
        assert guard.session.run.step == 12, "a later fit is another run"

    def test_another_try_in_the_same_loop(self, tmp_path):
        """A step does not train from scratch after one that could not resume."""
        interrupted(zoo.plain, zoo.regression(), on_disk(tmp_path), 9)
        other, guard = _compiled(keras.Sequential([keras.Input((6,)), layers.Dense(1)])), on_disk(tmp_path, resume=True)
        with pytest.raises(GuardError, match="another model"), guard.watch(other):
            for _ in range(2):
                with pytest.raises(GuardError, match="another model"):
                    guard.session.before()

    @pytest.mark.parametrize("which", ["fit", "loop"])
    def test_a_later_fit_of_the_guard(self, which, tmp_path):
        """A script of several fits that was killed in the second: its first fit does not get that state. If it has
        nothing to train, the second one resumes.
        """
        data, more, keep = zoo.regression(), zoo.regression(seed=3), {"keep": 1}

        def script(guard, before, *cut):
            keras.utils.set_random_seed(0)
            model = zoo.plain()
            zoo.fit(model, data, guard, epochs=before)
            zoo.fit(model, more, guard, *cut, epochs=2)
            return model

        whole = script(on_disk(tmp_path / "whole", snapshot=keep), 2)
        with pytest.raises(KeyboardInterrupt):
            script(on_disk(tmp_path, snapshot=keep), 2, Cut(15))
        guard = on_disk(tmp_path, resume=True, snapshot=keep)
        model = zoo.plain()
        before = model.get_weights()
        with pytest.raises(GuardError, match=r"of fit 1 .* of fit 2\. Pass epochs=0 "):
            if which == "fit":
                zoo.fit(model, data, guard, epochs=2)
            else:
                with guard.watch(model):
                    pass
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(script(guard, 0).get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.daily("unbuilt-*")
    @pytest.mark.parametrize("epochs", [4, 2])
    @pytest.mark.parametrize("case", [c for c in RESUMED if c != "every kind of state"])
    def test_nothing_left_to_train(self, case, epochs, tmp_path, capsys):
        """A script run again after its end, or with fewer epochs, ends with the last snapshot."""
        build, data, _ = RESUMED[case]
        done = zoo.run(build, data(), guard=on_disk(tmp_path, snapshot={"every": 4, "verify_after": 0}), epochs=4)
        keras.utils.set_random_seed(77)
        guard, at_begin = on_disk(tmp_path, resume=True), []
        begin = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: at_begin.extend(begin.model.get_weights())
        )
        guard.verbose = 1
        before = sorted(tmp_path.rglob("*"))
        again = zoo.run(build, data(), guard=guard, epochs=epochs, callbacks=[begin])
        assert again.history == {} and again.guard.session.run.step == 0
        pairs = zip(*([*run.model.variables, *run.model.optimizer.variables] for run in (again, done)), strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other), err_msg=one.path)
        for one, other in zip(at_begin, done.model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other, "callbacks have to see it, too")
        assert f"epochs={epochs}" in capsys.readouterr().out
        assert sorted(tmp_path.rglob("*")) == before
        again.model.fit(data().x, data().y, batch_size=8, epochs=1, verbose=0)
        assert again.model.history.epoch == [0], "the fit after it begins as it is reported"

    def test_nothing_left_without_a_number_of_epochs(self, tmp_path):
        """The same with a `CallbackList` in a hand-written loop, which has no number of epochs."""
        done = zoo.run(zoo.plain, zoo.regression(), guard=on_disk(tmp_path, snapshot={"every": 4, "verify_after": 0}), epochs=1)
        other, data = zoo.plain(), zoo.regression()
        other.set_weights([weight * 0 for weight in other.get_weights()])
        callbacks = keras.callbacks.CallbackList([on_disk(tmp_path, resume=True)], add_history=True, model=other)
        other.fit(data.x, data.y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        for one, saved in zip(other.get_weights(), done.model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, saved)

    def test_loop_with_nothing_left(self, tmp_path):
        """A hand-written loop without remaining steps ends with the last snapshot, too."""
        model = zoo.plain()
        zoo.run(lambda: model, zoo.regression(), guard=on_disk(tmp_path, snapshot={"every": 4, "verify_after": 0}), epochs=1)
        other = zoo.plain()
        other.set_weights([weight * 0 for weight in other.get_weights()])
        with on_disk(tmp_path, resume=True).watch(other):
            pass
        for one, saved in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, saved)

    @pytest.mark.parametrize("cut", [2, 9])
    def test_initial_epoch(self, cut, tmp_path, capsys):
        """Resumed in the epoch of its snapshot, the first included, for any `initial_epoch`."""
        interrupted(zoo.plain, zoo.regression(), on_disk(tmp_path), cut)
        guard = on_disk(tmp_path, resume=True)
        run = zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=3, initial_epoch=2)
        assert run.model.history.epoch == [0, 1, 2]
        whole = zoo.run(zoo.plain, zoo.regression(), epochs=3)
        for (path, one), (_, other) in zip(run.state, whole.state, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=path)

    def test_killed_before_the_model_was_built(self, tmp_path, recwarn):
        """Also before the second snapshot of a model that its first step builds."""
        build, data, _ = RESUMED["unbuilt"]
        interrupted(build, data(), on_disk(tmp_path), 2)
        run = zoo.run(build, data(), guard=on_disk(tmp_path, resume=True), epochs=1)
        assert run.guard.session.run.step == 12
        warned = [str(w.message) for w in recwarn if "was written before the model was built" in str(w.message)]
        assert len(warned) == (zoo.BACKEND == "tensorflow")

    def test_misuse(self, tmp_path):
        """Disk storage or resuming without a directory, and resuming from memory or nothing."""
        for arguments in ({"snapshot": {"storage": "disk"}}, {"resume": True}):
            with pytest.raises(GuardError, match="directory"):
                NanGuard(**arguments)
        (tmp_path / "own.toml").write_text('snapshot.storage = "memory"')
        in_memory = {"snapshot": {"storage": "memory"}}
        for policy in (in_memory, Policy.load(in_memory), tmp_path / "own.toml"):
            with pytest.raises(GuardError, match="storage"):
                NanGuard(policy, directory=tmp_path, resume=True)
        with pytest.raises(GuardError, match="storage"):
            NanGuard(directory=tmp_path, resume=True, **in_memory)
        with pytest.raises(GuardError, match="every"):
            NanGuard("observe", directory=tmp_path, resume=True)

    @pytest.mark.parametrize("policy", ["recover", {"snapshot": {"every": 7}}, Policy.load(Policy.load("stop"), snapshot={"every": 7})])
    def test_resuming_keeps_snapshots_on_disk(self, tmp_path, policy):
        guard = NanGuard(policy, directory=tmp_path, resume=True)
        assert guard.policy.snapshot.storage == "disk"
        assert guard.policy.rules == Policy.load(policy).rules

    def test_a_policy_over_another_keeps_its_snapshots(self):
        """Also what no one has set: `long-run` has other defaults."""
        source = Policy.load("long-run")
        source = source.model_copy(update={"snapshot": type(source.snapshot)(every=10)})
        assert Policy.load(source, limits=[]).snapshot == source.snapshot


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    interrupted(zoo.plain, zoo.regression(), on_disk(directory, snapshot={"keep": 4}), 23)
    return directory


@pytest.fixture
def copied(left, tmp_path):
    """Return the folder of the snapshots of a copy of that run."""
    return Path(shutil.copytree(left / "snapshots", tmp_path / "snapshots"))


class TestFiles:
    def test_plain_arrays(self, left):
        """Any program can read the NumPy archive by the paths of the variables."""
        path = written(left / "snapshots")[-1]
        paths = [path for path, _ in json.loads((path / "snapshot.json").read_text())["variables"]]
        model = zoo.plain()
        with np.load(path / "state.npz", allow_pickle=False) as arrays:
            stored = {path: arrays[f"v{number}"] for number, path in enumerate(paths)}
        for weight in model.weights:
            weight.assign(stored[weight.path])
        assert stored[next(path for path in stored if path.endswith("iteration"))] == read(path).step
        assert zoo.bad_entries(model) == []

    def test_searching_a_variable_reads_no_array(self, tmp_path):
        weights, other = variable(1.0, 2.0), variable()
        file = save(tmp_path, state(weights), Time(1, 1, 0, 1), verified=True)
        assert file[id(weights)].tolist() == [1.0, 2.0]
        file.close()
        (file.path / "state.npz").unlink()
        assert id(weights) in file and id(other) not in file

    @pytest.mark.parametrize("name", ["state.npz", "snapshot.json", "guard_state.json"])
    @pytest.mark.parametrize("how", ["cut", "flipped", "missing", "empty", "foreign"])
    def test_broken(self, copied, tmp_path, name, how):
        """Any change of the newest one is detected, and the next one used, with a warning."""
        *_, older, newest = written(copied)
        file = copied / name if name == "guard_state.json" else newest / name
        content = file.read_bytes()
        file.unlink()
        if how != "missing":
            at = len(content) // 2
            broken = {"cut": content[:at], "flipped": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]}
            file.write_bytes({**broken, "empty": b"", "foreign": b'{"format": 1, "sha256": "00"}'}[how])
        with pytest.warns(UserWarning, match="older snapshot|policy state"):
            found = find(tmp_path, 12)
        assert found.path == (newest if name == "guard_state.json" else older)

    def test_all_broken(self, copied, tmp_path):
        for path in written(copied):
            (path / "state.npz").write_bytes(b"")
        with pytest.raises(GuardError, match="checksum"), pytest.warns(UserWarning):
            find(tmp_path, 12)

    @pytest.mark.parametrize("resume", [True, False])
    def test_foreign_files(self, copied, tmp_path, resume):
        """Other names among the snapshots are left alone, and so are the targets of links."""
        oldest, *_, newest = written(copied)
        names = ("snapshot-old", "snapshot-00000003.bak", f"{newest.name} (copy)", "snapshot-", "step-000100 (copy)", "snapshot-٣٣٣٣٣٣٣٣")
        for name in names:
            shutil.copytree(newest, copied / name)
        (copied / "snapshot-00000090").write_bytes(b"a file")
        (copied / "snapshot-00000091").symlink_to(tmp_path / "gone")
        oldest.rename(tmp_path / "elsewhere")
        oldest.symlink_to(tmp_path / "elsewhere")
        before = {name: sorted(p.name for p in (copied / name).iterdir()) for name in names}
        guard = on_disk(tmp_path, resume=resume)
        zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=3)
        assert guard.session.run.step == (36 - 20 if resume else 36)
        assert {name: sorted(p.name for p in (copied / name).iterdir()) for name in names} == before
        assert (copied / "snapshot-00000090").read_bytes() == b"a file"
        assert (tmp_path / "elsewhere" / "snapshot.json").exists() and not oldest.is_symlink()
        assert [int(p.name[9:]) > 91 for p in written(copied)] == [True, True]

    def test_folder_that_cannot_be_read(self, tmp_path):
        """The run does not silently start from scratch."""
        (tmp_path / "snapshots").write_bytes(b"")
        with pytest.raises(GuardError, match="cannot be read"):
            zoo.run(zoo.plain, zoo.regression(), guard=on_disk(tmp_path, resume=True))

    def test_file_that_cannot_be_read(self, copied, tmp_path, monkeypatch):
        *_, older, newest = written(copied)
        open_file = Path.open

        def forbidden(path, *args, **kwargs):
            if path == newest / "state.npz":
                raise PermissionError(13, "Permission denied", str(path))
            return open_file(path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", forbidden)
        with pytest.warns(UserWarning, match="cannot be read.*Permission denied"):
            assert find(tmp_path, 12).path == older

    def test_rollback_past_a_broken_one(self, tmp_path):
        data = zoo.regression()
        for batch in (8, 9, 10):
            zoo.poison(data, batch, where="y")
            data.y[batch * 8 + 2] = 1e38

        def spoil(batch, logs):
            if batch == 7:
                (written(tmp_path / "snapshots")[-1] / "state.npz").write_bytes(b"no")

        guard = on_disk(tmp_path, snapshot={"keep": 4, "every": 3, "verify_after": 1})
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=spoil)
        with pytest.warns(UserWarning, match="skips a snapshot"):
            zoo.run(zoo.plain, data, guard=guard, epochs=1, callbacks=[callback])
        reported = [o.detail for i in guard.incidents for o in i.outcomes if o.action == "rollback"]
        assert reported == ["restored the state after 3 steps; 5 committed steps undone"]

    def test_keep(self, tmp_path):
        """Never more than `keep` folders, also of an earlier run; the newest is the new run's."""
        for _ in range(2):
            run = zoo.run(lambda: zoo.plain(run_eagerly=True), zoo.regression(), guard=on_disk(tmp_path), epochs=1)
        records = [read(path) for path in written(tmp_path / "snapshots")]
        assert [record.step for record in records] == [5, 10] and run.guard.session.run.step == 12

    def test_bfloat16(self, tmp_path):
        """Variables of a dtype that NumPy cannot write are restored bit by bit."""

        def build():
            keras.config.set_dtype_policy("bfloat16")
            rnn = layers.SimpleRNN(3, stateful=True, recurrent_initializer="glorot_uniform")
            model = keras.Sequential([keras.Input((8, 6), batch_size=8), rnn, layers.Dense(1)])
            model.compile("sgd", "mse")
            keras.config.set_dtype_policy("float32")
            return model

        data = zoo.Data(zoo.draw(sequence=8), zoo.regression().y)
        whole = zoo.run(build, data, epochs=2)
        with pytest.raises(KeyboardInterrupt):
            zoo.run(build, data, guard=on_disk(tmp_path), epochs=2, callbacks=[Cut(15)])
        keras.backend.clear_session()
        resumed = zoo.run(build, data, guard=on_disk(tmp_path, resume=True), epochs=2)
        for (path, one), (_, other) in zip(resumed.state, whole.state, strict=True):
            assert one.tobytes() == other.tobytes(), path


def test_written_files_are_complete_or_absent(tmp_path):
    """An unfinished file or folder leaves nothing, and the old one with its name is kept."""
    path = tmp_path / "one.txt"
    with atomic_files.beside(path) as unfinished:
        unfinished.write_text("whole")
        assert not path.exists()
    with pytest.raises(OSError, match="full"), atomic_files.beside(path) as unfinished:
        unfinished.write_text("half")
        raise OSError("full")
    with pytest.raises(KeyboardInterrupt), atomic_files.beside(tmp_path / "folder") as unfinished:
        unfinished.mkdir()
        (unfinished / "file").touch()
        raise KeyboardInterrupt
    assert path.read_text() == "whole" and os.listdir(tmp_path) == ["one.txt"]


def test_a_folder_that_cannot_be_removed_does_not_block_the_next(tmp_path, monkeypatch):
    real, stuck = shutil.rmtree, f".unfinished-{os.getpid()}-removed"
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: None if path.name == stuck else real(path, **more))
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        atomic_files.remove(tmp_path / name)
    assert os.listdir(tmp_path) == [stuck]
    monkeypatch.undo()
    atomic_files.sweep(tmp_path)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, sys, time
sys.path[:0] = {paths!r}
import keras, numpy as np
from support import zoo
from keras_nanguard import NanGuard

def child(directory):
    data = zoo.poison(zoo.regression(), 3)
    guard = NanGuard(verbose=0, diagnose=False, directory=directory, resume=True,
                     snapshot={{"storage": "disk", "every": 1, "verify_after": 0, "keep": 2}})
    zoo.run(lambda: zoo.plain(run_eagerly=True), data, guard=guard, epochs=10_000)

def written():
    folder = sys.argv[1] + "/snapshots"
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name.split("-")[1]) for name in names if name.startswith("snapshot-")), default=0)

for delay in sys.argv[2:]:
    last = written()
    pid = os.fork()
    if not pid:
        child(sys.argv[1])
        os._exit(1)
    while written() < last + 2:  # that of the state it began with, and one after a step: JAX compiles for long
        time.sleep(0.01)
    time.sleep(float(delay))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    print("killed", flush=True)
"""


def _killed(directory, delays):
    here = Path(__file__).parents[1]
    script = KILLED.format(paths=[str(here), str(here.parent)])
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", script, str(directory), *map(str, delays)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    positions = []
    for line in process.stdout:
        assert line == "killed\n"
        found = find(directory)
        assert found is not None and found.record.verified
        with np.load(found.path / "state.npz", allow_pickle=False) as arrays:
            assert all(np.isfinite(arrays[name]).all() for name in arrays)
        positions.append((found.epoch, found.batch))
    process.wait()
    return positions


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_killed(tmp_path, recwarn, kills):
    """An intact good state is left, from which the next one continues, never an earlier one."""
    random.seed(0)
    positions = _killed(tmp_path, [0.3 * random.random() for _ in range(kills)])
    assert len(positions) == kills and positions == sorted(positions) and positions[-1] > positions[0]
    assert not [w for w in recwarn if "NanGuard" in str(w.message)], "a kill leaves nothing that is broken"


@pytest.mark.parametrize("operation", range(12))
def test_cut_at_each_operation(tmp_path, monkeypatch, operation):
    """For each last of the 12 file operations of a snapshot, the files on disk are intact."""
    guard = on_disk(tmp_path, snapshot={"keep": 2, "every": 3, "verify_after": 0})
    state = {"left": 60 + operation, "dead": False}

    def failing(real):
        def call(*args, **kwargs):
            state["left"] -= 1
            if state["left"] < 0:
                state["dead"] = True
                raise SystemExit
            return real(*args, **kwargs)

        return call

    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr("shutil.rmtree", failing(__import__("shutil").rmtree))
    with pytest.raises(SystemExit):
        zoo.run(lambda: zoo.plain(run_eagerly=True, dropout=False), zoo.regression(), guard=guard, epochs=5)
    monkeypatch.undo()
    found = find(tmp_path, 12)
    assert state["dead"] and found.record.verified and found.record.step > 0
