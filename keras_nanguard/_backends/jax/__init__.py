"""The transaction, fault injection and replay on JAX.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `programs` | what the program of a step shows, and its division into two |

Names that are private to JAX: `jax._src.distributed` (`host`), `Tracer._trace` and the `primal` of
a tracer below `jax.grad` (`intercept`), `jax._src.core.EvalTrace` (`replay`). Without the last one
the guard trains as before, and a diagnosis has only the layer table. The others are needed.
"""
