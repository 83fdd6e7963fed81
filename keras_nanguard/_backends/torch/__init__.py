"""The transaction on PyTorch.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `attempt` | one attempt of a step, and what its body has done |
| `learned`, `learning` | what the steps of a body have shown, for later ones |
| `undo_log` | what a refusal restores |
| `found_gradients` | the gradients that a step finds and may add to |
| `late_writes` | what a step writes in place after its update |
| `outside_state` | schedulers, scalers and tensors outside of the train state |
| `intercept` | the functions in place of updates and of the loss computation |
| `calls` | what the body of a step calls |
| `updates` | the updates of a step |
| `execution` | one run of the body, its commit or refusal |
| `judging` | the verdict on a step: the numbers that are read of it, and what follows |
| `state_tensors` | the tensors of a train state by role |
| `modules`, `optimizers` | modules and optimizers of torch in Keras' form |
| `numeric_errors` | exceptions by which torch reports a bad number |
"""
