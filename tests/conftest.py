"""Settings for the whole suite: quiet, deterministic, one thread for each worker, helper modules importable."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatchcase
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
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is not a defect
settings.register_profile("daily", UNHURRIED, max_examples=25)
settings.register_profile("nightly", UNHURRIED, max_examples=150)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples of a test over random ones."""
    settings.load_profile("nightly" if config.getoption("nightly") else "daily")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test on the backends that its `requires_backend` does not name."""
    for marker in item.iter_markers("requires_backend"):
        if os.environ["KERAS_BACKEND"] not in marker.args:
            pytest.skip(marker.kwargs["reason"])


WITHOUT_BACKEND = (
    *("core/", "policy/", "lint/", "cli/test_demo.py", "diagnosis/test_causes.py"),
    "diagnosis/test_decided.py",
    *("test_api.py", "test_architecture.py", "test_docs.py", "test_layout.py"),
    *("test_packaging.py", "docs/"),
    *("backends/test_rules.py", "keras_internals/test_layers_and_losses.py"),
)
"""Tests that use no backend, or give the same result on each: they run on TensorFlow only."""


SHARED = (
    *("cli/", "clients/", "diagnosis/", "files/", "recording/", "recovery/", "report/"),
    *("test_benchmarks.py", "test_errors.py", "test_formats.py", "test_no_warnings.py"),
    *("transaction/test_copies.py", "transaction/test_lifecycle.py", "transaction/test_traps.py"),
    *("transaction/test_guard_model.py", "transaction/test_metrics_that_are_nan.py"),
    "transaction/test_python_state.py",
)
"""Tests of the packages above the backends. With `--share` each runs on one backend, as does a
test marked `shared`."""

NIGHTLY = (
    *("campaigns/", "clients/", "docs/test_site.py", "docs/test_types.py"),
    *("docs/test_several_devices.py", "report/test_browser.py"),
    *("test_examples.py", "keras_internals/test_upstream_defects.py"),
    *("backends/jax/test_process_matrix.py", "backends/torch/test_process_matrix.py"),
)
"""Tests of campaigns, other libraries, the browser, process matrices and the site.

They run with `--nightly`, as do the cases that `@pytest.mark.daily` does not name.
"""

DAILY_PAGES = ("README.md", "docs/start/first_run.md")
"""Pages whose code runs without `--nightly`."""

COMPILED = ("steps", "xla", "execution", "tf", "every kind", "memorised", "DataLoader")
"""Words in the name of a case that runs on TensorFlow; most need a compiled step."""

BACKENDS = ("torch", "tensorflow", "jax")
"""Backends of shared tests: the first one that can run a test runs it. PyTorch compiles nothing."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share` and `--nightly`."""
    parser.addoption("--nightly", action="store_true", help="also run what `make test` leaves out")
    parser.addoption("--share", action="store_true", help="run each shared test on one backend")


def backend_of(item: pytest.Item) -> str:
    """Return the backend on which a shared test runs."""
    named = [marker.args for marker in item.iter_markers("requires_backend")]
    able = [backend for backend in BACKENDS if all(backend in args for args in named)]
    case = item.callspec.id if hasattr(item, "callspec") else ""
    compiled = any(word in case for word in COMPILED)
    if not able or ("tensorflow" in able and compiled):
        return "tensorflow"
    return able[0]


def _is_nightly_page(name: str) -> bool:
    return name.startswith("test_page[") and name[len("test_page[") : -1] not in DAILY_PAGES


def _is_nightly_case(item: pytest.Item) -> bool:
    """Whether `@pytest.mark.daily` omits this case of a parametrized test."""
    marks, case = list(item.iter_markers("daily")), getattr(item, "callspec", None)
    daily = [pattern for mark in marks for pattern in mark.args]
    return bool(marks and case) and not any(fnmatchcase(case.id, pattern) for pattern in daily)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file if none of its tests runs here."""
    if collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(HERE).as_posix()
    backend = os.environ["KERAS_BACKEND"]
    if not config.getoption("nightly") and path.startswith(NIGHTLY):
        return True
    if backend != "tensorflow" and path.startswith(WITHOUT_BACKEND):
        return True
    if backend == "jax" and config.getoption("share") and path.startswith(SHARED):
        return 'requires_backend("jax"' not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Omit nightly cases, and with `--share` tests that run on another backend."""
    backend = os.environ["KERAS_BACKEND"]

    def left_out(item: pytest.Item) -> bool:
        path = item.path.relative_to(HERE).as_posix()
        if not config.getoption("nightly") and (
            _is_nightly_page(item.name) or _is_nightly_case(item)
        ):
            return True
        if not config.getoption("share") or path.startswith(WITHOUT_BACKEND):
            return False
        shared = path.startswith(SHARED) or item.get_closest_marker("shared")
        return shared and backend_of(item) != backend

    others = {item for item in items if left_out(item)}
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest):
    """Reset the policy and layer names for each test that trains, and remove its objects."""
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
    gc.freeze()  # the graphs that TensorFlow never releases would make each later collection take seconds


@pytest.fixture
def set_limit(monkeypatch: pytest.MonkeyPatch):
    """`set_limit(name, value)` sets a limit of `support.limits` for one test."""
    from support.limits import LIMITS

    def set_to(name: str, value: float) -> None:
        monkeypatch.setattr(f"keras_nanguard.{LIMITS[name]}", value)

    return set_to


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, set_limit: Callable[[str, float], None]):
    """`room(size)` sets the free memory, in bytes, or to what a function returns; every copy is checked."""
    set_limit("bytes that are allocated unchecked", -1)
    set_limit("bytes that are left free", 0)

    def leave(size: float | Callable[[], float]) -> None:
        free = size if callable(size) else lambda: size
        monkeypatch.setattr("keras_nanguard._core.memory.room", lambda root=None: free())

    return leave


@pytest.fixture
def snapshots_kept(monkeypatch: pytest.MonkeyPatch):
    """A guard keeps its snapshots after the fit, for tests that read them."""
    monkeypatch.setattr("keras_nanguard._fit.snapshots.Ring.close", lambda ring: None)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch):
    """Treat the processor as a device for which PyTorch's host has to wait."""
    monkeypatch.setattr("keras_nanguard._backends.torch.reductions.is_away", lambda tensors: True)


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """`once(name, make)`: the result of `make(folder)`, computed by the first worker that needs it;
    it must be valid JSON.

    Tests of one file may run in several workers: one computes the result, and the others wait for
    it and read it.
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
