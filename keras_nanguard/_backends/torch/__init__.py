"""The transaction on PyTorch.

In addition to the modules that every backend has:

| module | content |
|---|---|
| `modules` | modules and optimizers of torch in Keras' form |
| `tensors` | the parts and the memory of tensors |
| `parts`, `arguments` | the inputs of a step: the tensors of the train state, and the arguments |
| `backup`, `undo_log` | what a refusal restores |
| `updates`, `update_queue` | the updates of a step, and when they run |
| `judging` | the verdict on a step, and the counts in the report of a bad one |
| `numeric_errors` | exceptions by which torch reports a bad number |
"""
