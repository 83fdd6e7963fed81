"""Code to paste for each cause of which code can say what to do."""

from __future__ import annotations

from keras_nanguard._core.incident import Diagnosis

__all__ = ["snippet"]

_CLEAN = """\
bad = ~np.isfinite({name}).reshape(len({name}), -1).all(axis=1)
print("bad rows:", np.flatnonzero(bad))
{name} = {name}[~bad]  # and the same rows of all other arrays"""

_SNIPPETS = {
    "input_nonfinite": _CLEAN,
    "target_nonfinite": _CLEAN,
    "target_out_of_range": "print(np.min(y), np.max(y), np.unique(y)[:20])  # the loss takes class indices from 0 to classes - 1",
    "input_scale": "normalization = keras.layers.Normalization()\nnormalization.adapt(x_train)  # make it the first layer of the model",
    "float16_overflow": "# the layer to blame in float32, all others in half precision\nlayer = keras.layers.Dense(units, dtype='float32')",
    "float16_underflow": "optimizer = keras.optimizers.LossScaleOptimizer(optimizer)\nmodel.compile(optimizer, loss)",
    "loss_scale_collapsed": "keras.config.set_dtype_policy('mixed_bfloat16')  # the range of float32, and no loss scale",
    "loss_domain": "y_pred = keras.ops.clip(y_pred, 1e-7, 1.0 - 1e-7)  # before a log; or loss(..., from_logits=True)",
    "forward_domain": "x = keras.ops.maximum(x, 1e-7)  # before log, sqrt or a division",
    "gradient_domain": "y = keras.ops.sqrt(x + 1e-7)  # not sqrt(x), whose slope at 0 is infinite",
    "divergence": "optimizer = type(model.optimizer)(learning_rate / 10, global_clipnorm=1.0)\nmodel.compile(optimizer, loss)",
    "spike": "optimizer = type(model.optimizer)(learning_rate, global_clipnorm=1.0)\nmodel.compile(optimizer, loss)",
    "optimizer_domain": "optimizer = keras.optimizers.Adam(learning_rate, epsilon=1e-5)",
    "batchnorm_statistics": "keras_nanguard.recalibrate(model, x_train)",
    "training_flag": "y = layer(x, training=training)  # hand the argument of call on; check that nothing sets trainable = False",
    "state_nonfinite": "print(keras_nanguard.scan(model))  # which variables; then load a good checkpoint",
}


def snippet(diagnosis: Diagnosis) -> str:
    """Return code to paste, `""` where there is none. It holds no name from the data but one that is an identifier."""
    name = diagnosis.culprit_shown
    return _SNIPPETS.get(diagnosis.cause, "").replace("{name}", name if name.isidentifier() else "x")
