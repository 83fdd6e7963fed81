"""Shared parts of the tests: models, data, programs, the oracle, and scripts."""
