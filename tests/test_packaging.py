"""The metadata of the package agree with each other."""

import configparser
import re
from pathlib import Path

import keras_nanguard

ROOT = Path(__file__).parents[1]


def settings() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    return found


def test_metadata():
    """The version is one, classifiers and lowest Python agree, and the license files exist."""
    metadata = settings()["metadata"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", keras_nanguard.__version__)
    pythons = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])
    assert settings()["options"]["python_requires"] == f">={pythons[0]}" and len(pythons) >= 3
    assert all((ROOT / name).is_file() for name in metadata["license_files"].split())
