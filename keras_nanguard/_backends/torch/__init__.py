"""The transaction on PyTorch.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `modules` | modules and optimizers of torch in Keras' form |
| `updates` | the updates of a step |
| `watch` | what a step writes after its update |
| `undo_log` | what a refusal restores |
| `parts` | how a body is run, what its steps have shown, and its train state by role |
| `judging` | the verdict on a step |
| `raised` | exceptions by which torch reports a bad number |
| `learning` | what a step shows about its body, for later steps |
"""
