"""These tests import modules of one backend, so they are not collected on the others."""

import os

collect_ignore_glob = [] if os.environ["KERAS_BACKEND"] == "jax" else ["test_*.py"]
