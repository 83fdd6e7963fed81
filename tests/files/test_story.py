"""The case that the library began with: ruined BatchNorm statistics in a model nested in a model,
found and healed."""

import json

import numpy as np
import pytest

from keras_nanguard import recalibrate, repair, scan
from keras_nanguard.__main__ import main


def ruin(backbone, nan, huge):
    backbone.get_layer(nan).moving_variance.assign(
        np.full(backbone.get_layer(nan).moving_variance.shape, np.nan)
    )
    backbone.get_layer(huge).moving_variance.assign(
        np.full(backbone.get_layer(huge).moving_variance.shape, 1e12)
    )


def test_a_small_nested_model_is_healed_in_python_and_by_command_line(
    keras, nested, task, tmp_path, capsys
):
    """`scan` names both layers, `repair` makes the predictions finite, `recalibrate` brings the
    accuracy back."""
    model = nested()
    model.fit(*task, epochs=25, verbose=0)
    recalibrate(model, task[0])
    reached = model.evaluate(*task, verbose=0)[1]
    ruin(model.get_layer("backbone"), "post_bn", "conv_bn")
    path = str(tmp_path / "ruined.keras")
    model.save(path)
    assert np.isnan(model.predict(task[0], verbose=0)).any()

    for report in (scan(model), scan(path)):
        assert [entry.path for entry in report.bad] == [
            "backbone/post_bn/moving_variance",
            "backbone/conv_bn/moving_variance",
        ]
    assert main(["scan", path, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [layer["path"] for layer in document["layers"][:2]] == [
        "backbone/post_bn",
        "backbone/conv_bn",
    ]

    assert main(["repair", path]) == 0
    healed = keras.models.load_model(tmp_path / "ruined.repaired.keras")
    assert np.isfinite(healed.predict(task[0], verbose=0)).all()
    recalibrate(healed, task[0])
    assert healed.evaluate(*task, verbose=0)[1] == reached

    assert repair(model).ok
    assert np.isfinite(model.predict(task[0], verbose=0)).all()


@pytest.mark.slow
def test_a_resnet101v2_is_healed(keras, tmp_path):
    """The same with `ResNet101V2` at 64 pixels within a functional model, weights drawn at
    random."""
    keras.utils.set_random_seed(0)
    backbone = keras.applications.ResNet101V2(
        weights=None, include_top=False, input_shape=(64, 64, 3), pooling="avg"
    )
    inputs = keras.Input((64, 64, 3))
    model = keras.Model(
        inputs, keras.layers.Dense(2, activation="softmax", name="head")(backbone(inputs))
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    labels = np.arange(16) % 2
    images = (
        np.random.default_rng(0)
        .normal(labels[:, None, None, None] * 2.0, 0.5, (16, 64, 64, 3))
        .astype(np.float32)
    )
    recalibrate(model, images, batch_size=16)
    features = backbone(images, training=False)
    head = keras.Sequential([keras.Input(features.shape[1:]), model.get_layer("head")])
    head.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    head.fit(features, labels, epochs=30, verbose=0)
    reached = model.evaluate(images, labels, verbose=0)[1]
    assert reached > 0.9

    ruin(backbone, "post_bn", "conv5_block3_2_bn")
    path = str(tmp_path / "resnet.keras")
    model.save(path)
    expected = [
        "resnet101v2/post_bn/moving_variance",
        "resnet101v2/conv5_block3_2_bn/moving_variance",
    ]
    assert [entry.path for entry in scan(model).bad] == expected
    assert [entry.path for entry in scan(path).bad] == expected
    assert not np.isfinite(model.predict(images, verbose=0)).all()

    assert repair(path).ok
    healed = keras.models.load_model(tmp_path / "resnet.repaired.keras")
    assert np.isfinite(healed.predict(images, verbose=0)).all()
    recalibrate(healed, images, batch_size=16)
    assert healed.evaluate(images, labels, verbose=0)[1] == reached
