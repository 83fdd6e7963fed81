"""Model files and live models: `scan`, `repair`, `recalibrate`; and bundles.

| module | content |
|---|---|
| `scan`, `repair`, `recalibrate` | the public functions |
| `reports` | their results |
| `repair_options` | the options of a repair |
| `problems` | what counts as a problem |
| `isolated`, `worker` | a file is read in another process: the two ends of the pipe |
| `formats` | how a file of each kind becomes `formats.contents.Contents` |
| `live` | how a live model becomes the same |
| `repair_arrays`, `repair_live`, `repair_file` | the repair of any model, a live one, a file |
| `initial_values` | the initial values that a repair of a file needs |
| `loading` | models and data for the command line |
| `bundles` | the folder of an incident |
"""
