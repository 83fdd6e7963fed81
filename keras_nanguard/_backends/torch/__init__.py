"""The transaction on PyTorch.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `execution` | one run of the body, and its commit or refusal |
| `intercept` | the functions in place of updates and of the loss computation |
| `calls` | the updates and losses that a step has called |
| `learning` | what a step shows about its body |
| `modules` | modules and optimizers of torch in Keras' form |
| `updates` | the updates of a step |
| `undo_log` | what a refusal restores |
| `found_gradients` | the gradients that a step finds and may add to |
| `late_writes` | what a step writes in place after its update |
| `outside_state` | schedulers, scalers and tensors outside of the train state |
| `state_tensors` | the tensors of a train state by role |
| `seen` | what the steps have shown about one thing: unknown, no, yes |
| `step_context` | a step that is about to run, and what earlier ones have shown |
| `judging` | the verdict on a step: the numbers that are read of it, and what follows |
| `numeric_errors` | exceptions by which torch reports a bad number |
"""
