"""Everything that uses Keras internals: a release of Keras that changes them breaks only this
package.

Each module names at its head the private names that it uses because there is no public API.
`tests/keras_internals/test_internals.py` fails when a release of Keras removes one of them.

A module imports only modules above it:

| module | knows | replaces for a while |
|---|---|---|
| `overrides` | how an attribute of one instance is replaced | any attribute |
| `arrays` | the values of a tensor of any backend as a NumPy array | |
| `torch_tensors` | a tensor of PyTorch as a variable of Keras; the buffers of its modules | |
| `variables` | what a variable is; how its value is read, written and restored | values |
| `all_or_none` | how many variables are written without a mixture of two states | |
| `layers` | the layers of a model; the graph, inputs and outputs of a functional one | |
| `losses` | the losses and metrics of a compiled model | |
| `optimizers` | the optimizers of a model; rate, loss scale and slots of each | rate, strategy |
| `train_state` | all variables of a model and its optimizers, by role | |
| `attributes` | the Python attributes that a train step may write, and how they are restored | |
| `precision` | how a model computes in float32 | dtypes, values |
| `compiled` | what the train function of a model was made for, and by whom | `trainable` |
| `jax_trainer` | the state that `fit` passes from step to step on JAX | |
| `fitting` | the running `fit`: callbacks, data, printing, first epoch, end | the callbacks |
"""
