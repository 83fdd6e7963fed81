"""The transaction on PyTorch.

The modules on the path of a step, besides those that every backend has:

| module | content |
|---|---|
| `state` | the train state: modules of torch as models, tensors by role |
| `undo_log` | the old values of what the step writes, and how a refusal restores them |
| `intercept` | what replaces its updates and its loss computation, and the record of these calls |
| `watching` | what only an eager body shows: writes, backward passes, updates by other optimizers |
| `optimizers`, `updates` | optimizers of torch in the form of Keras; one update |
| `attempt` | what earlier runs of the body have shown, and what this one has done so far |
| `judging` | the verdict on it: the numbers that are read, and what follows |
| `execution` | the run itself, its commit or refusal |

`numeric_errors` recognizes exceptions by which torch reports a bad number.
"""
