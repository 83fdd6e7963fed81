"""Settings for the whole suite: quiet, deterministic, one thread for each worker, helper modules importable."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
if os.environ["KERAS_BACKEND"] == "jax" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="compiled-")  # what one worker has compiled, the others and their processes load
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no defect
settings.load_profile("unhurried")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a test out on the backends that it does not name: `@pytest.mark.requires_backend("torch", reason="...")`."""
    for marker in item.iter_markers("requires_backend"):
        if os.environ["KERAS_BACKEND"] not in marker.args:
            pytest.skip(marker.kwargs["reason"])


WITHOUT_BACKEND = (
    *("core/", "policy/", "lint/", "cli/test_demo.py", "diagnosis/test_causes.py", "diagnosis/test_decided.py"),
    *("test_api.py", "test_architecture.py", "test_docs.py", "test_layout.py", "test_packaging.py"),
    *("campaigns/test_installed.py", "campaigns/test_matrix.py", "campaigns/test_mutate.py"),
    *("docs/test_howto.py", "docs/test_reference.py", "docs/test_site.py", "docs/test_types.py"),
)
"""What imports no backend, reads files only, or comes to the same on each, and so is run once: on TensorFlow."""


SHARED = (
    *("clients/", "diagnosis/", "files/", "recording/", "recovery/", "report/"),
    *("transaction/test_copies.py", "transaction/test_lifecycle.py", "transaction/test_traps.py"),
)
"""Tests of what is above the backends. With `--share` each of them runs on one backend, else on all of them."""

NIGHTLY = (
    *("campaigns/", "clients/", "docs/test_site.py", "docs/test_types.py", "docs/test_several_devices.py"),
    *("report/test_browser.py", "report/test_notebook.py", "test_examples.py"),
    *("backends/jax/test_process_matrix.py", "backends/torch/test_process_matrix.py"),
)
"""Tests with other libraries, notebooks, browsers, several processes and the whole site: run with `--nightly`, as `make nightly` does."""

DAILY_PAGES = ("README.md", "docs/start/first_run.md")
"""Pages whose code runs without `--nightly`."""

ON_ONE = ("steps", "xla", "execution", "tf", "unscaled", "every kind", "memorised", "DataLoader", "compiled")
"""What in a name says that a test may be skipped on a backend: it stays with TensorFlow, which skips none of these."""

BACKENDS = ("tensorflow", "jax", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share` and `--nightly`."""
    parser.addoption("--nightly", action="store_true", help="run what `make test` leaves to `make nightly` as well")
    parser.addoption("--share", action="store_true", help="leave each test of what is above the backends to one backend")


def backend_of(item: pytest.Item) -> str:
    """Return the backend on which a test runs that is shared."""
    named = [marker.args for marker in item.iter_markers("requires_backend")]
    able = [backend for backend in BACKENDS if all(backend in args for args in named)]
    alone = any(word in item.name for word in ON_ONE) and "tensorflow" in able
    return "tensorflow" if alone or not able else able[zlib.crc32(item.nodeid.encode()) % len(able)]


def _is_nightly_page(name: str) -> bool:
    return name.startswith("test_page[") and name[len("test_page[") : -1] not in DAILY_PAGES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out on JAX and PyTorch what does not depend on the backend, and what runs on another one with `--share`."""
    here, backend = Path(__file__).parent, os.environ["KERAS_BACKEND"]

    def left_out(item: pytest.Item) -> bool:
        path = item.path.relative_to(here).as_posix()
        if not config.getoption("nightly") and (path.startswith(NIGHTLY) or _is_nightly_page(item.name)):
            return True
        if backend != "tensorflow" and path.startswith(WITHOUT_BACKEND):
            return True
        return config.getoption("share") and path.startswith(SHARED) and backend_of(item) != backend

    others = {item for item in items if left_out(item)}
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest):
    """Give every test that trains a model the float32 policy and fresh layer names, and take away what it left."""
    if "keras" not in sys.modules:  # the tests of policy and records need no backend
        yield
        return
    import keras

    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session(free_memory=False)  # a fixture of the module may have made models just now
    yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session(free_memory=False)
    gc.collect()
    gc.freeze()  # the graphs that TensorFlow keeps for good would make each later collection take seconds


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch):
    """A diagnosis that takes long because the machine is busy prints no line that says so."""
    if "keras" in sys.modules:
        monkeypatch.setattr("keras_nanguard._diagnose.notice.SLOW", 600.0)


@pytest.fixture
def snapshots_kept(monkeypatch: pytest.MonkeyPatch):
    """A guard keeps its snapshots after the fit, for tests that read them then."""
    monkeypatch.setattr("keras_nanguard._fit.snapshots.Ring.close", lambda ring: None)


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """`once(name, make)`: what `make(folder)` returns, made by the worker that asks first; JSON has to hold it.

    Tests of one file can come to several workers, and what one of them has made the others wait for and read.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base

    def found(name, make):
        folder = base / f"once-{name}"
        folder.mkdir(exist_ok=True)
        reported = folder / "reported.json"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not reported.exists():
                reported.write_text(json.dumps(make(folder)))
        return json.loads(reported.read_text())

    return found
