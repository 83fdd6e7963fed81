"""The transaction on PyTorch.

The modules on the path of a step, besides those that every backend has:

| module | content |
|---|---|
| `state_tensors` | the tensors of the train state by role |
| `undo_log` | the old values of what the step writes, and how a refusal restores them |
| `intercept` | what replaces its updates and its loss computation, and the record of these calls |
| `watching` | what only an eager body shows: writes, backward passes, updates by other optimizers |
| `updates` | one update |
| `attempt` | what earlier runs of the body have shown, and what this one has done so far |
| `judging` | the verdict on it: the numbers that are read, and what follows |
| `execution` | the run itself, its commit or refusal |

`modules` and `optimizers` give those of torch the form of Keras; `numeric_errors` recognizes
exceptions by which torch reports a bad number.
"""
