"""The recording of a run: measurements of each step, and events, in memory and in one file."""
