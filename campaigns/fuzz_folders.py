"""The folder of an input, the files next to it, and the commands that are run on it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from campaigns.fuzz_oracles import SENTINEL, Wrong, check_printed
from campaigns.fuzz_recipes import Recipe, patched

__all__ = ["chosen", "command", "emptied", "file_name", "link", "not_from_outside", "outside", "sized"]


def outside(folder: Path) -> None:
    """Write the files that no reader may open, next to the folder of the inputs."""
    import h5py
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret.txt").write_text(SENTINEL * 20)
    np.savez(folder / "secret.npz", **{"0": np.full(4, SECRET)})
    with h5py.File(folder / "secret.h5", "w") as file:
        file["secret"] = np.full(4, SECRET)


SECRET = 123456.789
"""The value of every array outside."""


def command(*words: object, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    """Run the command line, check its output and exit code, and return the output."""
    from keras_nanguard._cli.parser import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    if code not in codes:
        raise Wrong(f"{words[0]} ends with {code}")
    check_printed(out.getvalue() + err.getvalue(), f"command {words[0]}")
    return out.getvalue()


def sized(path: Path, data: bytes, recipe: Recipe) -> Path:
    path.write_bytes(patched(data, recipe.get("patch")))
    return path


def chosen(path: Path, share: int) -> bool:
    """Whether an input is one of the few for which everything is run, which takes as long as all
    other inputs together.
    """
    file = path if path.is_file() else next((file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink()), None)
    return file is None or zlib.crc32(file.read_bytes()) % share == 0


def file_name(name: str) -> str:
    plain = "".join(c for c in name if c.isprintable() and c not in "/\\")[:60]
    return plain if plain.strip(". ") else "x"


def link(path: Path, target: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        path.unlink(missing_ok=True)
        os.mkfifo(path) if target == "fifo" else path.symlink_to(target)


def not_from_outside(array: Any) -> None:
    if array.dtype.kind == "f" and array.itemsize == 8 and (array == SECRET).any():
        raise Wrong("an array of a file outside the folder")


def emptied(folder: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
