"""The original use case: bad BatchNorm statistics in a nested model are found and repaired."""

import json

import numpy as np

from keras_nanguard import recalibrate, repair, scan
from keras_nanguard.__main__ import main


def ruin(backbone, nan, huge):
    backbone.get_layer(nan).moving_variance.assign(
        np.full(backbone.get_layer(nan).moving_variance.shape, np.nan)
    )
    backbone.get_layer(huge).moving_variance.assign(
        np.full(backbone.get_layer(huge).moving_variance.shape, 1e12)
    )


def test_a_small_nested_model_is_repaired_in_python_and_on_the_command_line(
    keras, nested, task, tmp_path, capsys
):
    """`scan` names both layers, `repair` cures the predictions, `recalibrate` the accuracy."""
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
