"""A `CallbackList` in a hand-written loop around `train_on_batch`."""

from __future__ import annotations

import keras
import pytest
from support import zoo

from keras_nanguard import NanGuard

BAD = (3, 7)


def network():
    return zoo.plain(keras.optimizers.SGD(0.01, momentum=0.9), dropout=False, metrics=())


def undiagnosed():
    return NanGuard(verbose=0, diagnose=False)


def loop(guards, epochs=2, train=True, dies_at=None, kept=None):
    """Train as documented by Keras; return the model."""
    keras.utils.set_random_seed(0)
    model = network()
    keras.utils.set_random_seed(1)
    run(model, guards, epochs, train, dies_at, kept)
    return model


def run(model, guards, epochs=2, train=True, dies_at=None, kept=None):
    data = zoo.regression().with_poison(BAD)
    calls = keras.callbacks.CallbackList(guards, model=model, epochs=epochs, steps=data.batches, verbose=0)
    if kept is not None:
        kept.append(calls)
    calls.on_train_begin()
    logs = None
    for epoch in range(epochs):
        calls.on_epoch_begin(epoch)
        model.reset_metrics()
        for batch in range(data.batches):
            calls.on_train_batch_begin(batch)
            rows = slice(batch * zoo.BATCH, (batch + 1) * zoo.BATCH)
            if batch == dies_at:
                raise RuntimeError("dies")
            if train:
                logs = model.train_on_batch(data.x[rows], data.y[rows], return_dict=True)
            calls.on_train_batch_end(batch, logs)
        calls.on_epoch_end(epoch, dict(logs or {}))
    calls.on_train_end()


def test_guarded_as_in_fit():
    """Bad steps are refused and reported, and the state equals that of `fit`."""
    guard = NanGuard(verbose=0)
    with zoo.as_written():
        model = loop([guard])
    data = zoo.regression().with_poison(BAD)
    fitted = zoo.run(network, data, guard="undiagnosed")
    assert [(i.epoch, i.batch) for i in guard.incidents] == [(e, b) for e in range(2) for b in BAD]
    assert zoo.bad_entries(model) == []
    assert guard.session.finished and "make_train_function" not in vars(model)
    zoo.assert_same(model.get_weights(), fitted.model.get_weights(), 1e-5)


@pytest.mark.shared
@pytest.mark.daily("*" if zoo.BACKEND == "torch" else "another guard")
@pytest.mark.parametrize("anew", [True, False], ids=["another guard", "the same guard"])
def test_loop_that_died_does_not_block_the_next(anew, recwarn):
    """In a notebook the list of an interrupted cell still exists when the cell runs again."""
    kept, guard, model = [], undiagnosed(), network()
    with pytest.raises(RuntimeError, match="dies"):
        run(model, [guard], dies_at=5, kept=kept)
    second = undiagnosed() if anew else guard
    run(model, [second], epochs=1)
    assert len(second.incidents) == (2 if anew else 3) and zoo.bad_entries(model) == []
    assert not any("Two NanGuards" in str(w.message) for w in recwarn)
    model.fit(*zoo.regression().all, batch_size=zoo.BATCH, verbose=0, callbacks=[second])
    assert second.session.run.step == zoo.BATCHES


@pytest.mark.shared
@pytest.mark.parametrize("verbose", [0, 1])
def test_loop_that_cannot_be_guarded(verbose, capsys):
    """A loop that trains without `train_on_batch` gets one line, with the remedy."""
    loop([NanGuard(verbose=verbose)], train=False)
    said = capsys.readouterr().out
    assert said.count("no step was guarded") == 1 and "guard.watch(model)" in said
