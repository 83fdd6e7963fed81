"""All data of the package are in the wheel, and what a user of the sources needs in the sdist."""

import configparser
import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

import keras_nanguard

ROOT = Path(__file__).parents[1]
NOT_PACKED = {".gitignore"}


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a clone: git lists no files here")
    return done.stdout.splitlines()


def settings() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    return found


def test_data_of_the_package():
    """Each file of the package that is not a module matches a pattern of `package_data`."""
    patterns = settings()["options.package_data"]["keras_nanguard"].split()
    data = [name.partition("/")[2] for name in tracked() if name.startswith("keras_nanguard/") and not name.endswith(".py")]
    assert len(data) > 10
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def test_sources():
    """Each file next to the package is named in MANIFEST.in, or packed by setuptools anyway."""
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8")
    folders = set(re.findall(r"^graft (\S+)", manifest, re.MULTILINE)) | {"keras_nanguard"}
    named = set(" ".join(re.findall(r"^include (.+)", manifest, re.MULTILINE)).split()) | {"setup.cfg", "pyproject.toml", "MANIFEST.in"}
    left = {name for name in tracked() if name.partition("/")[0] not in folders} - named - NOT_PACKED
    assert left == set()


def test_metadata():
    """Version, classifiers and lowest Python agree; the changelog begins with this release."""
    metadata = settings()["metadata"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", keras_nanguard.__version__)
    pythons = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])
    assert settings()["options"]["python_requires"] == f">={pythons[0]}" and len(pythons) >= 3
    assert all((ROOT / name).is_file() for name in metadata["license_files"].split())
