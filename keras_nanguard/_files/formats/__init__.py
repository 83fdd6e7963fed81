"""How a model file of each kind becomes `contents.Contents`, whose arrays are read in pieces. No
module here imports a backend.

| module | content |
|---|---|
| `opening` | `opened` recognizes the kind of a file and has it read |
| `hdf5`, `npz`, `orbax` | the readers of `.h5`, `.npz` and Orbax checkpoints |
| `names` | the names of stored arrays, as in the live model |
| `contents` | `Contents`, its arrays, and their names and roles |
| `limits` | how much is read of a file, and the errors of parsers |
"""
