"""The flight recorder: what each step measured and what was done, in memory and in one file."""
