"""Shared parts of the tests: models, data, programs, the oracle, and scripts that run in separate
processes.
"""
