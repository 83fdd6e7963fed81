"""Files are read in the process of the tests, which takes a tenth of the time of a separate one."""

import contextlib
import json
import os
import queue

import pytest

from keras_nanguard._files import isolated, worker


@contextlib.contextmanager
def within(request):
    """Read a file in this process, which takes a tenth of the time of a separate one."""
    lines, folder = queue.SimpleQueue(), os.getcwd()
    write = lambda message: lines.put(json.dumps(message).encode() + b"\n")  # noqa: E731
    write({})
    write(worker.answer(request, lambda *done: write({"progress": done})))
    os.chdir(folder)
    yield lines


@pytest.fixture(autouse=True)
def in_this_process(request, monkeypatch):
    """Read files in this process, except in a test with the fixture `own_process`."""
    if "own_process" not in request.fixturenames:
        monkeypatch.setattr(isolated, "_worker", within)


@pytest.fixture
def own_process():
    """In this test each file is read in a separate process, as for a user."""
