"""Model files and live models: `scan`, `repair`, `recalibrate`; and bundles.

| module | content |
|---|---|
| `scan`, `repair`, `recalibrate` | the public functions |
| `scan_report`, `repair_report` | their results, and the options of a repair |
| `problems` | what counts as a problem |
| `reading`, `worker` | a file is read in another process: the two ends of the pipe |
| `opening` | a file of any kind as `stored.Contents`, whose arrays are read in pieces |
| `hdf5`, `orbax`, `stored` | the readers, and their limits |
| `names` | names of stored arrays as in the live model |
| `live` | a live model as `stored.Contents`, and its repair; loading |
| `repairs`, `repair_file` | the repair of any model, and of a file |
| `bundles` | the folder of an incident |
"""
