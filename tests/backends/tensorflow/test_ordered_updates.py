"""Updates of large weights: one after another, and with the bits that they have otherwise."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from backends.tensorflow.test_updates import AS_IT_IS, BY_KERNELS, network
from support import zoo

from keras_nanguard._backends.tensorflow import updates
from keras_nanguard._backends.tensorflow.intercept import Update


@pytest.mark.daily("Adam", "EMA", "accumulates", "loss scale")
@pytest.mark.parametrize("name", [*BY_KERNELS, *(pytest.param(name, marks=pytest.mark.slow) for name in AS_IT_IS)])
def test_the_same_bits(name, set_limit):
    """In this order or in any, guarded with bad batches put in, the run ends as the plain one without them."""
    set_limit("bytes of a large TensorFlow update", 1)
    make = (BY_KERNELS[name] if name in BY_KERNELS else (AS_IT_IS[name],))[0]
    data = zoo.regression()
    guarded = zoo.run(lambda: network(make()), data.with_poison((2, 5)), guard=True)
    assert zoo.differences(guarded, zoo.run(lambda: network(make()), data)) == []


def before(op):
    """Return every operation that has to run before this one."""
    known, left = set(), [op]
    while left:
        one = left.pop()
        for other in (*one.control_inputs, *(tensor.op for tensor in one.inputs)):
            if other not in known:
                known.add(other)
                left.append(other)
    return known


@pytest.mark.parametrize(("size", "waits"), [(4, False), (1024, True)])
def test_one_by_one(size, waits):
    """All of the update of a large weight waits for the one before it; small ones run when they like."""
    optimizer = keras.optimizers.Adam()
    weights = [keras.Variable(tf.zeros((size, 1024))) for _ in range(3)]
    optimizer.build(weights)

    @tf.function
    def update(gradients):
        updates.run([Update(optimizer, optimizer.apply, gradients, weights)], [optimizer])

    graph = update.get_concrete_function([tf.TensorSpec((size, 1024))] * 3).graph
    handles = {id(internal): id(external) for external, internal in graph.captures}
    writes = {}
    for op in graph.get_operations():
        if op.type.startswith(("Assign", "ResourceApply")):
            writes.setdefault(handles.get(id(op.inputs[0])), []).append(op)
    first, second, third = (writes[id(w.value.handle)] for w in weights)
    moments = [op for v in optimizer.variables if v.path.endswith("velocity") for op in writes[id(v.value.handle)]]
    assert all(set(first) <= before(op) for op in (*second, *moments[1:])) == waits
    assert all(set(second) <= before(op) for op in (*third, *moments[2:])) == waits
    assert "update_step" not in vars(optimizer)
