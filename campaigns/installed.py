"""Tests the published files: installs the wheel and the sdist in empty environments.

    python campaigns/installed.py dist

Without a backend the package can be imported, the commands that need none work, and the others
print one sentence. With each backend, installed as an extra: a fit with a NaN, the demo, and the
short suite, whose tests are in another folder. The sdist is built, and the tests in it are run.
Before that the lists of files are compared with those in git. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns import environments, short_suite

ROOT = Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")

NOT_PACKED = (".gitignore",)
"""Files in git that an sdist does not need."""

FIT = """
import keras, keras_nanguard, numpy as np
from keras_nanguard import NanGuard
assert "site-packages" in keras_nanguard.__file__, keras_nanguard.__file__
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
x[20, 1] = np.nan
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
guard = NanGuard(verbose=0, directory="run")
model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
guard.report("run.html")
(incident,) = guard.incidents
assert (incident.step, incident.diagnosis.cause, incident.diagnosis.samples) == (2, "input_nonfinite", (4,)), incident
assert all(np.isfinite(weight).all() for weight in model.get_weights())
model.save("good.keras")
"""

MAKE_FILES = """
import numpy as np
np.savez("good.npz", kernel=np.ones((2, 2), "float32"))
np.savez("bad.npz", kernel=np.array([1.0, np.nan], "float32"))
open("policy.toml", "w").write('preset = "recover"\\n[snapshot]\\nevery = 50\\n')
open("typo.toml", "w").write('preset = "recovr"\\n')
"""

WITHOUT_BACKEND = (
    (("--version",), 0, "1."),
    (("--help",), 0, "check-policy"),
    (("scan", "good.npz"), 0, "good.npz"),
    (("scan", "bad.npz"), 1, "1 NaN"),
    (("repair", "bad.npz", "-o", "repaired.npz", "--weights", "zeros"), 0, ""),
    (("check-policy", "policy.toml"), 0, 'preset = "recover"'),
    (("check-policy", "typo.toml"), 1, "recover"),
    (("lint", "good.npz"), 2, "backend"),
    (("demo",), 2, "backend"),
)
"""A command, its exit code, and its output, without a backend."""


class Failure(Exception):
    """An error in the installed package."""


def missing(wheel: Path, sdist: Path) -> list[str]:
    """Return the files in git that the wheel or the sdist lacks."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    of_package = [name for name in tracked if name.startswith("keras_nanguard/")]
    packed = [name for name in tracked if name not in NOT_PACKED]
    return [f"wheel: {name}" for name in of_package if name not in in_wheel] + [f"sdist: {name}" for name in packed if name not in in_sdist]


def run(words: Sequence[str], folder: Path, backend: str | None = None, code: int = 0, said: str = "") -> None:
    """Run a command of an environment.

    Raises:
        Failure: if it ends with another code, does not print the expected text, or prints a
            traceback.
    """
    settings = short_suite.environment_of(backend or "")
    if backend is None:
        del settings["KERAS_BACKEND"]
    done = subprocess.run(words, cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != code or said not in done.stdout or "Traceback" in done.stdout:
        raise Failure(f"{' '.join(words[1:])[:80]!r}: exit code {done.returncode} instead of {code}, printed:\n{done.stdout[-2000:]}")


def without_backend(archive: Path, python: str, folder: Path) -> None:
    """Test an archive without a backend."""
    with environments.fresh(python) as interpreter:
        environments.install(interpreter, [str(archive)])
        run([str(interpreter), "-c", "import keras_nanguard; print(keras_nanguard.__version__)"], folder, said="1.")
        run([str(interpreter), "-c", MAKE_FILES], folder)
        for words, code, said in WITHOUT_BACKEND:
            run([str(interpreter.with_name("keras-nanguard")), *words], folder, code=code, said=said)


def with_backend(archive: Path, python: str, backend: str, folder: Path, source: Path = ROOT) -> None:
    """Test an archive with a backend: a fit, the demo, and the short suite, whose tests are in this
    tree or in an sdist.
    """
    with environments.fresh(python) as interpreter:
        environments.install(interpreter, [f"keras-nanguard[{backend},demo] @ {archive.resolve().as_uri()}", *short_suite.NEEDS])
        command = str(interpreter.with_name("keras-nanguard"))
        run([str(interpreter), "-c", FIT], folder, backend)
        run([command, "report", "run"], folder, backend, code=1, said="input_nonfinite")
        run([command, "lint", "good.keras"], folder, backend)
        run([command, "demo"], folder, backend, said="accuracy")
        (folder / "suite").mkdir()
        result = short_suite.run(interpreter, backend, folder / "suite", source=source)
        if not result.good:
            raise Failure("\n".join(result.failures))
        print(f"  {result.passed} tests passed, {result.skipped} skipped", flush=True)


def with_its_own_tests(sdist: Path, python: str, folder: Path) -> None:
    """Test an sdist with the tests in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    with_backend(sdist, python, "jax", folder, source)


def tries(wheel: Path, sdist: Path, python: str) -> dict[str, Callable[[Path], None]]:
    """Return all checks in a folder, by name."""
    return {
        "wheel, without a backend": functools.partial(without_backend, wheel, python),
        "sdist, without a backend": functools.partial(without_backend, sdist, python),
        **{f"wheel, {backend}": functools.partial(with_backend, wheel, python, backend) for backend in BACKENDS},
        "sdist, jax, with the tests that it holds": functools.partial(with_its_own_tests, sdist, python),
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder of the wheel and the sdist")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="the Python to test them with")
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    given = parser.parse_args()
    (wheel,), (sdist,) = given.folder.glob("*.whl"), given.folder.glob("*.tar.gz")
    gone = missing(wheel, sdist)
    print(*gone, sep="\n") if gone else print("every file in git is packed", flush=True)
    failed = len(gone)
    for name, attempt in tries(wheel, sdist, given.python).items():
        if given.only not in name:
            continue
        print(name, flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="installed-", ignore_cleanup_errors=True) as folder:
                attempt(Path(folder))
        except (Failure, environments.InstallError) as error:
            failed += 1
            print(f"  failed: {error}", flush=True)
    print("failed" if failed else "all of it works")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
