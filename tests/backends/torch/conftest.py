"""These tests import what belongs to one backend: on another they are not even collected."""

import os

collect_ignore_glob = [] if os.environ["KERAS_BACKEND"] == "torch" else ["test_*.py"]
