"""The transaction, fault injection and replay on TensorFlow.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `replica` | what one replica does in a trace |
| `mirrored` | the transaction of a step on several replicas |
| `updates` | in which order deferred updates run, and their bits |
| `kernels` | fused kernels for updates on a CPU |

Names that are private to TensorFlow: `FuncGraph._functions` and `Tensor._handle_data`
(`intercept`), `Function._autograph` and `Function._jit_compile` (`attach`), `Tensor._id`,
`Context._rng` of `tensorflow.python.eager.context`, and `tensorflow.python.framework.op_callbacks`
(`replay`). Without one of these names the guard trains as before and knows less: a step counts as
one without hidden state, a variable that is created in a loop of a graph is not restored, a
hand-written step is compiled with AutoGraph and without XLA, a replay advances the eager generator
without a seed, or records nothing.
"""
