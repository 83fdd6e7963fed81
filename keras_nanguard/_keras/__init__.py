"""Everything that uses Keras internals: a release of Keras that changes them breaks only this
package.

Each module names at its head the private names that it uses because there is no public API.
`tests/keras_internals/test_internals.py` fails when a release of Keras removes one of them.

| module | reads | changes, until undone |
|---|---|---|
| `train_state` | the variables of a model and its optimizers, by role | |
| `compiled` | the call of `compile`, and what a step was built for | `trainable`, functions |
| `variables`, `arrays` | variables and data, as NumPy arrays | values: all or none |
| `tensors` | tensors of torch without a variable of Keras | |
| `optimizers` | rate, loss scale, slots | the rate, the strategy |
| `layers` | layers at any depth, the graph of a functional model | dtype policies |
| `losses` | the losses and metrics given to `compile` | |
| `fitting` | callbacks, data, end of a running `fit` | methods of their list, first epoch |
| `attributes` | Python attributes of what a train step calls | the same |
| `precision` | | dtypes of layers, losses and variables |
| `jax_trainer` | the state that `fit` passes from step to step on JAX | the same |
| `overrides` | | attributes of instances; functions of classes, in one thread |
"""
