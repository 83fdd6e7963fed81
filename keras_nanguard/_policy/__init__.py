"""Policies: what they are, how they are read, and the pure function that decides by them. Imports no backend."""
