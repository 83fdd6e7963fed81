"""Code to paste, for causes that code can fix."""

from __future__ import annotations

from keras_nanguard._core.incident import Diagnosis

__all__ = ["snippet"]

_CLEAN = """\
bad = ~np.isfinite({name}).reshape(len({name}), -1).all(axis=1)
print("bad rows:", np.flatnonzero(bad))
{name} = {name}[~bad]  # and the same rows of all other arrays"""

_OPTIMIZER = """\
old = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # without its loss scale
config = old.get_config()
"""

_CLIPPED = (
    _OPTIMIZER
    + "config.update(clipnorm=None, clipvalue=None, global_clipnorm=1.0)  # one kind at a time\n"
)

_RATE = "float(keras.ops.convert_to_numpy(old.learning_rate))"

_COMPILED = "model.compile(type(old).from_config(config), model.loss)  # add your metrics"


_SNIPPETS = {
    "input_nonfinite": _CLEAN,
    "target_nonfinite": _CLEAN,
    "target_out_of_range": (
        "print(np.min(y), np.max(y), np.unique(y)[:20])  "
        "# the loss takes class indices from 0 to classes - 1"
    ),
    "input_scale": (
        "normalization = keras.layers.Normalization()\n"
        "normalization.adapt(x_train)  # make it the first layer of the model"
    ),
    "float16_overflow": (
        "# the named layer in float32, all others in half precision\n"
        "layer = keras.layers.Dense(units, dtype='float32')"
    ),
    "float16_underflow": (
        f"{_OPTIMIZER}config['loss_scale_factor'] = None  "
        "# a fixed scale would multiply the dynamic one\n"
        "scaled = keras.optimizers.LossScaleOptimizer(type(old).from_config(config))\n"
        "model.compile(scaled, model.loss)  # add your metrics"
    ),
    "loss_scale_collapsed": (
        "keras.config.set_dtype_policy('mixed_bfloat16')  # the range of float32, and no loss scale"
    ),
    "loss_domain": (
        "y_pred = keras.ops.clip(y_pred, 1e-7, 1.0 - 1e-7)  "
        "# before a log; or loss(..., from_logits=True)"
    ),
    "forward_domain": "x = keras.ops.maximum(x, 1e-7)  # before log, sqrt or a division",
    "gradient_domain": "y = keras.ops.sqrt(x + 1e-7)  # not sqrt(x), whose slope at 0 is infinite",
    "divergence": (
        f"{_CLIPPED}config['learning_rate'] = {_RATE} / 10  # in place of a schedule, too\n"
        f"{_COMPILED}"
    ),
    "spike": f"{_CLIPPED}{_COMPILED}",
    "optimizer_domain": (
        f"{_OPTIMIZER}config.update({{'epsilon': 1e-5}} if 'epsilon' in config else {{}})\n"
        f"{_COMPILED}"
    ),
    "batchnorm_statistics": "keras_nanguard.recalibrate(model, x_train)",
    "training_flag": (
        "# pass the argument of call on; check that no code sets trainable = False\n"
        "y = layer(x, training=training)"
    ),
    "state_nonfinite": (
        "print(keras_nanguard.scan(model))  # which variables; then load a good checkpoint"
    ),
}
"""Code by cause. Code that rebuilds the optimizer only needs the model."""


def snippet(diagnosis: Diagnosis) -> str:
    """Return code to paste, or `""`. It has no name from the data except identifiers."""
    name = diagnosis.culprit_shown
    return _SNIPPETS.get(diagnosis.cause, "").replace(
        "{name}", name if name.isidentifier() else "x"
    )
