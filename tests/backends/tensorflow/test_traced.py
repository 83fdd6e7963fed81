"""What is traced of a step without a fit around it: what it returns, how often, and that it stays what the user wrote."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.tensorflow_steps import (
    BAD,
    SIZE,
    WITH_BAD,
    TrainState,
    X,
    alone,
    batches,
    execution,
    network,
)


@pytest.mark.parametrize("way", ["deferred"])
def test_what_a_step_returns(way):
    """The outputs of a step that no trainer calls are those of the step, whatever they are made of; scalars among them are losses."""
    weight = keras.Variable(np.ones((3, 1), "float32"))
    model = keras.Sequential([keras.Input((3,))])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def body(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            error = tf.square(x @ weight - y)
        optimizer.apply([tape.gradient(error, weight.value)], [weight])
        rows = tf.RaggedTensor.from_row_lengths(error[:, 0], [1, SIZE - 1])
        return {"rows": rows, "none": None, "entries": tf.sparse.from_dense(x), "more": [tf.reduce_mean(error), tf.shape(x)[0]]}

    transaction = alone(model, way, body, logs=False)
    transaction.train_state = lambda: TrainState.of(model, [optimizer])
    execute, plain = execution(transaction, way), execution(body)
    before = np.array(weight)
    for step in (0, BAD[0], 3):
        batch = batches(WITH_BAD, [step])[0]
        outputs, verdict = transaction.read(execute(batch))
        assert verdict.refused == (step in BAD) == np.array_equal(np.array(weight), before)
        after = np.array(weight)
        weight.assign(before)
        expected = plain(batch)
        assert list(outputs) == list(expected) and outputs["none"] is None
        for one, other in zip(*(tf.nest.flatten(found, expand_composites=True) for found in (outputs, expected))):
            if one is not None:
                np.testing.assert_array_equal(one, other)
        if step not in BAD:
            np.testing.assert_array_equal(weight, after)
            np.testing.assert_allclose(verdict.loss, expected["more"][0])
        weight.assign(after)
        before = after


@pytest.mark.parametrize("way", ["deferred", "compiled"])
def test_python_stays_python(way):
    """A condition on a tensor is refused by TensorFlow as in a plain step: nothing rewrites what the user wrote."""
    model = network()

    def body(batch):
        return model.train_step(batch) if tf.reduce_mean(batch[0]) < 9.0 else {}

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        alone(model, way, body).trace(tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batches(X)[0]))


def test_other_sizes_of_batches():
    """A compiled step is not traced for each of them: in the end for all."""
    model, traces = network(), []

    def body(batch):
        traces.append(batch)
        return model.train_step(batch)

    execute = execution(alone(model, "compiled", body))
    for size in (4, 3, 2, 1):
        execute.get_concrete_function(tuple(part[:size] for part in batches(X)[0]))
    assert len(traces) < 4
