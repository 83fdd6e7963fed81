"""Single steps on PyTorch, with the transaction around them and without a fit; and watched loops."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import torch
from keras import layers, ops

from keras_nanguard import NanGuard
from keras_nanguard._backends.torch.attach import LoopStep
from keras_nanguard._backends.torch.step import Transaction
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._keras.train_state import TrainState

adapted = LoopStep.adapted

X, Y = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]]), torch.tensor([[1.0], [2.0]])


def network(optimizer=None, *more, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), *more, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer, loss)
    return model


def facts(model, optimizers=None, note_created=lambda tensor, value: None, refuse=True):
    """Return the facts of a run, as a transaction uses them."""
    return SimpleNamespace(
        model=model,
        refuses=refuse,
        agreement=Agreement(),
        note_created=note_created,
        tolerate_created=list,
        read_train_state=lambda: TrainState.of(model, optimizers),
    )


class Step(Transaction):
    """A transaction that keeps its last verdict."""

    def run_step(self, *args):
        executed = super().run_step(*args)
        self.verdict = executed.verdict
        return executed


def alone(model, body=None, **more):
    """Return the transaction of a Keras trainer."""
    of = {"of_trainer": True, "stock": body is None, "jit": False, "compiled": None}
    return Step(body or (lambda data: model.train_step(data)), facts(model, **more), **of)


def in_loop(body, model, optimizers=None, **more):
    """Return the transaction of a hand-written step."""
    of = {"of_trainer": False, "stock": False, "jit": False, "compiled": None}
    return Step(body, facts(model, optimizers, **more), **of)


class DeviceGenerator:
    """The generator of a GPU in torch's interface: it counts its draws by an offset."""

    def __init__(self, seed):
        self.seed, self.offset = seed, 0

    def get_state(self):
        return torch.tensor([self.seed, self.offset]).view(torch.uint8)

    def set_state(self, state):
        self.seed, self.offset = state.view(torch.int64).tolist()

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset

    def draw(self):
        """Draw a number, like a kernel; return the offset at which it is drawn."""
        self.offset += 4
        return self.offset - 4


def state(model):
    return [np.array(ops.convert_to_numpy(v)) for v in (*model.variables, *model.optimizer.variables)]


def same(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other))


def updated(model, data, optimizer=None):
    """Update a model like a hand-written step, and return the loss."""
    optimizer, variables = optimizer or model.optimizer, model.trainable_variables
    model.zero_grad()
    loss = model.compute_loss(x=data[0], y=data[1], y_pred=model(data[0], training=True))
    optimizer.scale_loss(loss).backward()
    with torch.no_grad():
        optimizer.apply([v.value.grad for v in variables], variables)
    return loss


def twice(model):
    """A hand-written step with two updates, of which the first is made before the verdict."""

    def body(data):
        loss = updated(model, data)
        zeros = [torch.zeros_like(v.value) for v in model.trainable_variables]
        model.optimizer.apply(zeros, model.trainable_variables)
        return {"loss": loss}

    return body


def own(model):
    """A hand-written step that ends with its update."""
    return lambda data: {"loss": updated(model, data)}


BODIES = {"stock": lambda model: None, "own": own, "twice": twice}
"""The kinds of steps, each with a function that returns its body for a model; none is that of
Keras.
"""


# Loops of torch


def loss_of(net, batch):
    """The squared error of a network whose target is the sum of each row without its NaN."""
    return (net(batch) - batch.nan_to_num().sum(1, keepdim=True)).square().mean()


def watched(net, optimizers, step, batches):
    """Run a step on each batch; return the guard and what the steps have returned."""
    with (guard := NanGuard(verbose=0)).watch(net, *optimizers):
        run_step = guard.step(step)
        return guard, [run_step(batch) for batch in batches]
