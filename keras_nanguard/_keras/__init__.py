"""Everything that uses Keras internals: a release of Keras that changes them breaks only this
package.

Each module names at its head the private names that it uses, and why.

| module | reads | changes, until undone |
|---|---|---|
| `train_state` | the variables of a model and its optimizers, by role | |
| `variables`, `sparse_arrays`, `spread_arrays` | variables and data, as NumPy arrays | values |
| `whole_writes` | | values of many variables: all or none |
| `optimizers`, `slot_gradients` | rate, loss scale, slots | the rate, the strategy |
| `layers`, `structure` | layers at any depth, the graph of a functional model | dtype policies |
| `losses` | the losses given to `compile` | |
| `fitting` | the call of `compile`, data and progress bar of a running `fit` | the first epoch |
| `running_fit` | callbacks of a running `fit`, and whether it still runs | methods of their list |
| `jax_trainer` | the state that `fit` passes from step to step on JAX | the same |
| `overrides` | | attributes of instances; functions of classes, in one thread |
"""
