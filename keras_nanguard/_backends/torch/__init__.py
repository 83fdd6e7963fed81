"""The transaction on PyTorch.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `modules` | modules and optimizers of torch in Keras' form |
| `updates` | the updates of a step |
| `watch` | what a step writes after its update |
| `undo_log` | what a refusal restores |
| `judging` | the verdict on a step |
| `learning` | what a step shows about its body, for later steps |
"""
