"""Models of Keras 2, now `tf_keras`: a clear error, and an unchanged model."""

import keras
import numpy as np
import pytest

from keras_nanguard import NanGuard, diagnose, lint
from keras_nanguard.errors import GuardError
from keras_nanguard.testing import inject


class Legacy:
    """A model with the attributes of `tf_keras` that the guard reads."""

    name, variables, trainable_variables = "old", (), ()


Legacy.__module__ = "tf_keras.src.engine.training"

USES = {
    "fit": lambda model: NanGuard().set_model(model),
    "watch": lambda model: NanGuard().watch(model, keras.optimizers.SGD()).__enter__(),
    "optimizer": lambda model: NanGuard().watch(keras.Sequential([keras.layers.Dense(1)]), model).__enter__(),
    "lint": lint,
    "diagnose": lambda model: diagnose(model, np.ones((2, 3))),
    "inject": lambda model: inject(model, site="loss", kind="nan", step=1).__enter__(),
}


@pytest.mark.parametrize("use", list(USES))
def test_is_refused(use):
    """The error names the object and the remedy."""
    with pytest.raises(GuardError, match=r"Expected a model and optimizers of Keras 3. Received: 'old', .* tf_keras"):
        USES[use](Legacy())


@pytest.mark.requires_backend("tensorflow", reason="tf_keras runs only on TensorFlow")
def test_the_real_one_is_left_as_it_was():
    """A fit with a guard raises the error, and a later one without a guard runs."""
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed: pip install tf_keras")
    model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    own = set(vars(model))
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    for call in (model.fit, model.evaluate):
        with pytest.raises(GuardError, match="tf_keras"):
            call(x, y, verbose=0, callbacks=[NanGuard()])
    assert set(vars(model)) == own and len(model.fit(x, y, verbose=0).history["loss"]) == 1
