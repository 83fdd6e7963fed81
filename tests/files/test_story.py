"""The original use case: bad BatchNorm statistics in a nested model are found and repaired."""

import json

import numpy as np
from support.command_line import main

from keras_nanguard import recalibrate, repair, scan


def ruin(backbone, nan, huge):
    for name, value in ((nan, np.nan), (huge, 1e12)):
        variable = backbone.get_layer(name).moving_variance
        variable.assign(np.full(variable.shape, value))


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
        found = [entry.path for entry in report.bad]
        assert found == [f"backbone/{name}/moving_variance" for name in ("post_bn", "conv_bn")]
    assert main(["scan", path, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    worst = [layer["path"] for layer in document["layers"][:2]]
    assert worst == ["backbone/post_bn", "backbone/conv_bn"]

    assert main(["repair", path]) == 0
    healed = keras.models.load_model(tmp_path / "ruined.repaired.keras")
    assert np.isfinite(healed.predict(task[0], verbose=0)).all()
    recalibrate(healed, task[0])
    assert healed.evaluate(*task, verbose=0)[1] == reached

    assert repair(model).ok
    assert np.isfinite(model.predict(task[0], verbose=0)).all()
