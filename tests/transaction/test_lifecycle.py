"""The guard attaches when a fit begins and detaches when it ends, for every way of ending."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
import zipfile

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import GuardInUseError, NanGuard, NanGuardModel, Recording
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._fit.run import Run

HOOKS = {"train_step", "make_train_function", "compute_loss", "apply", "_get_current_learning_rate"}


def left_behind(model):
    """Return the names that the guard has left on a model and its optimizer."""
    return HOOKS & (set(vars(model)) | set(vars(model.optimizer)))


class Raiser(keras.callbacks.Callback):
    """Raises in one of the calls of Keras."""

    def __init__(self, where, error):
        super().__init__()
        setattr(self, where, self.fail)
        self.error = error

    def fail(self, *args, **kwargs):
        raise self.error


@pytest.mark.daily("guard first-*", "guard last-ctrl-c-on_epoch_end")
@pytest.mark.parametrize("where", ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("first", [True, False], ids=["guard first", "guard last"])
def test_off_after_an_exception(where, error, first):
    """The guard detaches at once, while the traceback still exists."""
    model, data = zoo.plain(), zoo.regression(batches=3)
    callbacks = [NanGuard(verbose=0), Raiser(where, error)]
    with pytest.raises(type(error)) as held:
        zoo.fit(model, data, *(callbacks if first else callbacks[::-1]))
    assert held.tb is not None and left_behind(model) == set()


@pytest.mark.parametrize("error", [ValueError("of the user's own"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_off_after_an_exception_while_the_step_is_built(error):
    """An error before the first step reaches the user; the next fit starts from scratch."""

    class Failing(keras.optimizers.SGD):
        fails = True

        def build(self, variables):
            if self.fails:
                raise error
            super().build(variables)

    model, data = zoo.plain(), zoo.regression(batches=3)
    model.compile(Failing(0.01), "mse")
    for callbacks in ([NanGuard(verbose=0)], []):
        with pytest.raises(type(error)):
            zoo.fit(model, data, *callbacks)
        assert left_behind(model) == set()
    Failing.fails = False
    zoo.fit(model, data, NanGuard(verbose=0))
    assert int(model.optimizer.iterations) == 3


def test_off_after_an_exception_in_the_data():
    """A failing generator ends the fit, and detaches the guard."""

    def batches():
        yield zoo.draw(batches=1), np.zeros((zoo.BATCH, 1), "float32")
        raise RuntimeError("disk on fire")

    model = zoo.plain()
    with pytest.raises(Exception, match="disk on fire"):
        model.fit(batches(), verbose=0, callbacks=[NanGuard(verbose=0)])
    gc.collect()
    assert left_behind(model) == set()


@pytest.mark.parametrize("fails", ["changes", "end"])
def test_all_is_closed_if_the_end_of_a_fit_fails(tmp_path, monkeypatch, capsys, fails):
    """Locks, the recording and the methods of model and callbacks are released."""

    def broken(*args):
        raise ZeroDivisionError("the end")

    model, data = zoo.plain(), zoo.regression()
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    settings = {"directory": tmp_path / "run", "snapshot": {"every": 4, "storage": "disk"}, "lower_lr": {"recover_after": 0}}
    guard = NanGuard(**settings)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError, match="the end"):
        patched.setattr(Run if fails == "changes" else Recovery, fails, broken)
        zoo.fit(model, data, guard, checkpoint, validation_data=data.all)
    assert not left_behind(model) and "on_epoch_end" not in vars(checkpoint)
    assert Recording.read(tmp_path / "run").meta["status"] == "finished"
    capsys.readouterr()
    zoo.fit(model, data, NanGuard(**settings))
    assert "NanGuard: " not in capsys.readouterr().out


def test_guard_works_again_after_an_interruption():
    """On the same model or on another one."""
    model, data, guard = zoo.plain(), zoo.regression(), NanGuard(verbose=0)
    with pytest.raises(KeyboardInterrupt):
        zoo.fit(model, data, guard, Raiser("on_train_batch_end", KeyboardInterrupt()))
    zoo.poison(data, 3)
    for target in (model, zoo.plain()):
        before = len(guard.incidents)
        zoo.fit(target, data, guard)
        assert [i.step for i in guard.incidents[before:]] == [3]
        assert zoo.bad_entries(target) == []


def test_repeated_fits_and_recompile():
    """Also if the model is compiled again in between."""
    model, data, guard = zoo.plain(), zoo.poison(zoo.regression(), 5), NanGuard(verbose=0)
    for optimizer in (None, "sgd", "rmsprop"):
        if optimizer:
            model.compile(optimizer, "mse")
        zoo.fit(model, data, guard)
    assert [i.step for i in guard.incidents] == [5, 5, 5]
    assert zoo.bad_entries(model) == [] and left_behind(model) == set()


@pytest.mark.parametrize("used", [False, True])
def test_two_guards(used):
    """The first one guards, and a warning is printed once, also if the second was used."""
    model, data = zoo.plain(), zoo.poison(zoo.regression(), 2)
    one, two = NanGuard(verbose=0), NanGuard(verbose=0)
    if used:
        zoo.fit(model, zoo.regression(), two)
    with pytest.warns(UserWarning, match="Two NanGuards") as warned:
        model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[one, two])
    assert [w.filename for w in warned if "Two" in str(w.message)] == [__file__], "the line of the fit"
    assert [i.step for i in one.incidents] == [2] and two.incidents == []
    assert zoo.bad_entries(model) == [] and left_behind(model) == set()


def test_shared_by_two_fits_at_once(monkeypatch):
    """A guard of a running fit cannot be passed to a second one, and the first fit continues.

    The garbage collector is paused while the guard reads the frames of the other thread, because
    CPython 3.11 can crash.
    """
    current_frames, collecting = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: collecting.append(gc.isenabled()) or current_frames())
    guard, started, finish, errors = NanGuard(verbose=0), threading.Event(), threading.Event(), []

    class Wait(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            started.set()
            finish.wait(60)

    first, data = zoo.plain(), zoo.regression(batches=2)
    thread = threading.Thread(target=lambda: errors.append(zoo.fit(first, data, guard, Wait())))
    thread.start()
    started.wait(60)
    try:
        with pytest.raises(GuardInUseError, match="Create a separate NanGuard"):
            zoo.fit(zoo.plain(), data, guard)
    finally:
        finish.set()
        thread.join(60)
    assert len(errors) == 1 and left_behind(first) == set()
    assert collecting and not any(collecting) and gc.isenabled()


class Looks(keras.callbacks.Callback):
    """Evaluates a model, and predicts with it, with the guard of the running fit."""

    def __init__(self, guard, x, y, other=None):
        super().__init__()
        self.guard, self.x, self.y, self.other, self.found = guard, x, y, other, []

    def on_epoch_end(self, epoch, logs=None):
        looks, model = {"verbose": 0, "callbacks": [self.guard]}, self.other or self.model
        self.found.append(model.evaluate(self.x, self.y, **looks))
        model.predict(self.x, **looks)


@pytest.mark.parametrize("first", [True, False], ids=["guard first", "guard last"])
@pytest.mark.parametrize("other", [True, False], ids=["another model", "the same model"])
def test_results_in_the_middle_of_a_fit(first, other):
    """A callback may evaluate and predict with the guard of the running fit, which goes on."""
    data, guard = zoo.poison(zoo.regression(batches=4), 2), NanGuard(verbose=0)
    looks = Looks(guard, data.x[:4], data.y[:4], zoo.plain() if other else None)
    model = zoo.plain()
    zoo.fit(model, data, *((guard, looks) if first else (looks, guard)), epochs=2)
    assert [i.step for i in guard.incidents] == [2, 6] and len(looks.found) == 2
    assert zoo.bad_entries(model) == [] and left_behind(model) == set()
    zoo.fit(model, data, guard)
    assert [i.step for i in guard.incidents] == [2, 6, 2], "in use for the next fit"


@pytest.mark.parametrize("other", [True, False], ids=["another model", "the same model"])
def test_bad_results_in_the_middle_of_a_fit(other):
    """NaN in results of the guarded model is reported; in those of another model it is not."""
    data, guard = zoo.regression(batches=4), NanGuard(verbose=0)
    looks = Looks(guard, data.x[:4] * np.nan, data.y[:4], zoo.plain() if other else None)
    zoo.fit(zoo.plain(), data, guard, looks)
    assert [i.sites for i in guard.incidents] == ([] if other else [("validation",), ("predictions",)])


def test_results_in_the_middle_of_an_evaluation():
    """A callback of `evaluate` may predict with the same guard, which then sees the results."""
    data, guard = zoo.regression(batches=2), NanGuard(verbose=0)

    class Predicts(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.model.predict(data.x, verbose=0, callbacks=[guard])

    zoo.plain().evaluate(data.x * np.nan, data.y, verbose=0, callbacks=[guard, Predicts()])
    assert [i.sites for i in guard.incidents] == [("validation",)]


def test_results_in_the_middle_of_a_loop():
    """The loop goes on with its session. A fit with its guard is refused."""
    model, data, guard = zoo.plain(), zoo.regression(batches=2), NanGuard(verbose=0)
    with guard.watch(model):
        session = guard.session
        model.evaluate(data.x, data.y, verbose=0, callbacks=[guard])
        assert guard.session is session
        with pytest.raises(GuardInUseError, match=r"a running loop\. Create a separate NanGuard"):
            zoo.fit(zoo.plain(), data, guard)


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the state passes through the step")
def test_a_state_written_after_the_last_step_of_a_loop():
    """It is found at the end of the loop, as at the end of a fit, and the steps since a snapshot run again."""
    model, guard = zoo.plain(), NanGuard(verbose=0, diagnose=False)
    with guard.watch(model):
        step = guard.step(lambda x: model.train_step((keras.ops.convert_to_tensor(x), keras.ops.ones((8, 1))))["loss"])
        for _ in range(3):
            step(np.ones((8, 6), "float32"))
        good = model.get_weights()
        model.set_weights([weight * np.nan for weight in good])
        assert guard.incidents == []
    assert [(i.step, i.refused, "weights" in i.sites) for i in guard.incidents] == [(2, False, True)]
    zoo.assert_same(model.get_weights(), good)


def test_another_use_in_the_middle_of_a_fit():
    """A loop with its guard, or a step of a model that has it, is refused, and the fit goes on with its session."""
    (x, y), guard, refused = zoo.regression(batches=2).all, NanGuard(verbose=0), []
    inner = NanGuardModel(inputs := keras.Input((6,)), keras.layers.Dense(1)(inputs), guard=guard)
    inner.compile("adam", "mse")

    def watch():
        with guard.watch(zoo.plain()):
            pass

    def begin(batch, logs):
        session = guard.session
        for use in (watch, lambda: inner.train_on_batch(x, y)):
            with pytest.raises(GuardInUseError, match=r"a running fit of .*Create a separate NanGuard") as raised:
                use()
            refused.append(raised.value)
        assert guard.session is session

    model = zoo.plain()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[guard, keras.callbacks.LambdaCallback(on_train_batch_begin=begin)])
    assert len(refused) == 4 and guard.session.run.model is model and guard.session.run.step == 2


def test_callback_list_used_twice():
    """A `CallbackList` in a hand-written loop guards every fit for which it is used."""
    model, data, guard = zoo.plain(), zoo.poison(zoo.regression(), 4), NanGuard(verbose=0)
    callbacks = keras.callbacks.CallbackList([guard], add_history=True, model=model, epochs=1, verbose=0, steps=None)
    for _ in range(2):
        model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert [i.step for i in guard.incidents] == [4, 4]
    assert zoo.bad_entries(model) == [] and left_behind(model) == set()


def test_saved_models_are_plain_keras(tmp_path):
    """Nothing in them refers to this library, and the optimizer is that of a plain fit."""
    model, data = zoo.plain(), zoo.poison(zoo.regression(), 3)
    during = keras.callbacks.ModelCheckpoint(tmp_path / "during.keras", save_freq=5)
    zoo.fit(model, data, NanGuard(verbose=0), during)
    model.save(tmp_path / "after.keras")
    plain = zoo.plain()
    zoo.fit(plain, zoo.regression())
    for name in ("during", "after"):
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as archive:
            assert not any(b"nanguard" in archive.read(member).lower() for member in archive.namelist())
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        assert np.isfinite(loaded.predict(np.ones((2, 6), "float32"), verbose=0)).all()
        assert type(loaded.optimizer) is type(plain.optimizer)
        assert {**loaded.optimizer.get_config(), "name": ""} == {**plain.optimizer.get_config(), "name": ""}


@pytest.mark.requires_backend("tensorflow", reason="tf.distribute is TensorFlow's")
def test_fit_inside_of_a_strategy_scope():
    """A fit under `MirroredStrategy`, called inside its scope, is guarded and completes."""
    import tensorflow as tf

    data, guard = zoo.regression(), NanGuard(verbose=0)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = zoo.plain(optimizer=keras.optimizers.Adam(use_ema=True))
        model.fit(*data.all, batch_size=zoo.BATCH, epochs=1, verbose=0, callbacks=[guard])
    assert guard.incidents == [] and guard.session.run.step == zoo.BATCHES


@pytest.mark.parametrize("bad", [False, True])
def test_data_are_released(bad):
    """After `fit` nothing references its iterator, without a garbage collection."""

    def iterators():
        return [o for o in gc.get_objects() if any(kind.__name__ == "EpochIterator" for kind in type(o).__mro__)]

    data = zoo.regression()
    if bad:
        zoo.poison(data, 3)
    model = zoo.plain()
    gc.collect()
    before = len(iterators())
    gc.disable()
    try:
        zoo.fit(model, data, NanGuard(verbose=0))
        assert len(iterators()) == before
    finally:
        gc.enable()


@pytest.mark.requires_backend("torch", reason="in a compiled step the arrays of an exception are symbolic")
def test_an_exception_keeps_nothing_of_its_step():
    """Without the guard either: the memory is free for another try, before the garbage collector runs."""

    class Large:
        """Stands for the activations of the step."""

    def released(callbacks):
        found = []

        class Fails(keras.Model):
            def train_step(self, data):
                large = Large()
                found.append(weakref.ref(large))
                raise MemoryError("out of memory")

        inputs = keras.Input((4,))
        model = Fails(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(MemoryError):
                model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=callbacks)
            return found[0]() is None
        finally:
            gc.enable()

    assert released([]), "stock Keras releases it"
    assert released([NanGuard(verbose=0)])


def test_an_evaluation_before_the_first_step():
    """By a guard of its own; then the validation of a fit."""
    model, data = zoo.plain(), zoo.regression(batches=3)
    assert np.isfinite(model.evaluate(*data.all, verbose=0, callbacks=[NanGuard(verbose=0)])).all()
    model.fit(*data.all, validation_data=data.all, verbose=0, callbacks=[guard := NanGuard(verbose=0)])
    assert guard.incidents == [] and left_behind(model) == set()


def test_evaluate_and_predict_leave_the_results_of_training():
    """`stopped` and `refused` describe the training, also after an evaluate with the same guard."""
    guard, data = NanGuard("stop", verbose=0, diagnose=False), zoo.poison(zoo.regression(), 3)
    model = zoo.plain()
    zoo.fit(model, data, guard)
    assert guard.stopped and guard.refused
    model.evaluate(*zoo.regression().all, verbose=0, callbacks=[guard])
    model.predict(zoo.regression().x, verbose=0, callbacks=[guard])
    assert guard.stopped and guard.refused
    zoo.fit(model, zoo.regression(), guard)
    assert not (guard.stopped or guard.refused)
