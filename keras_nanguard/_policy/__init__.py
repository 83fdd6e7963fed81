"""Policies: their records and file formats, and the pure function `decide`. Imports no backend."""
