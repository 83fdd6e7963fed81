"""Temporary environments for campaigns, created by uv with a given Python and given packages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["InstallError", "fresh", "install", "uninstall", "uv", "versions"]

PRINT_VERSIONS = """
import json, platform, sys
from importlib import metadata
print(json.dumps({"python": platform.python_version(), **{name: metadata.version(name) for name in sys.argv[1:]}}))
"""


class InstallError(Exception):
    """An environment that cannot be created, or a package that cannot be installed."""


@functools.cache
def _settings() -> dict[str, str]:
    """Return the environment variables of uv: it finds all Pythons of pyenv, and pip's folder of
    wheels.
    """
    found = {"UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": "hardlink", **os.environ}
    if "PIP_FIND_LINKS" in os.environ:
        found.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], stdout=subprocess.PIPE, text=True, check=False).stdout.split()
        found["PYENV_VERSION"] = ":".join(listed)
    return found


def uv(*words: str, limit: float = 1200.0) -> str:
    """Run a command of uv, and return what it prints.

    Raises:
        InstallError: if it fails.
    """
    from uv import find_uv_bin

    try:
        done = subprocess.run([find_uv_bin(), *words], env=_settings(), capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"uv {words[0]} was not done after {limit:.0f} seconds") from error
    if done.returncode:
        raise InstallError(" ".join(done.stderr.split())[-400:])
    return done.stdout


@contextmanager
def fresh(python: str) -> Iterator[Path]:
    """Create an empty environment with a Python such as `3.12`, and yield its interpreter; remove
    it afterwards.

    Raises:
        InstallError: if there is no such Python.
    """
    with tempfile.TemporaryDirectory(prefix="environment-", ignore_cleanup_errors=True) as folder:
        uv("venv", "--quiet", "--python", python, "--no-project", f"{folder}/venv")
        yield Path(folder) / "venv" / "bin" / "python"


def install(python: Path, requirements: Sequence[str], *options: str) -> None:
    """Install packages into the environment of an interpreter.

    Raises:
        InstallError: if they cannot be installed.
    """
    uv("pip", "install", "--quiet", "--python", str(python), *options, *requirements)


def uninstall(python: Path, *packages: str) -> None:
    """Remove packages from the environment of an interpreter.

    Raises:
        InstallError: if they are not installed.
    """
    uv("pip", "uninstall", "--quiet", "--python", str(python), *packages)


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of packages in an environment."""
    import json

    done = subprocess.run([str(python), "-c", PRINT_VERSIONS, *packages], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
