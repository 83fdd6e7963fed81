"""Failing disks, damaged files, a clock that is set back, and two processes on one directory."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from campaigns.crash_life import (
    BATCHES,
    Beat,
    append,
    ended,
    forked,
    live,
    never_killed,
    nothing,
    same,
    versions,
)
from keras_nanguard._fit.resume import find
from keras_nanguard._fit.snapshot_files import read, written


class Case:
    """Trains in separate processes within one folder; has the expected final state."""

    def __init__(self, folder: Path, whole: Path):
        self.folder, self.whole, self.number = folder, whole, 0

    def train(self, directory: Path, tampered: Callable[[], None] = nothing, die: bool = False) -> dict[str, Any]:
        """Train to the end, or (`die`) until a process kills itself in its second epoch; return
        exit code, printed lines, and whether the final state is as expected.
        """
        self.number += 1
        result, log = self.folder / f"{self.number}.npz", self.folder / f"{self.number}.log"

        def work() -> None:
            if die:
                _dies_in_second_epoch()
            live(directory, result, mmap.mmap(-1, 1), tampered=tampered)

        code = ended(forked(work, log))
        lines = log.read_text().splitlines()
        said = spoken(lines) + [line.partition("UserWarning: ")[2] for line in lines if "UserWarning: NanGuard" in line]
        failed = "\n".join(lines[-20:]) if code > 0 else ""
        return {"code": code, "said": said, "same": result.exists() and same(self.whole, result), "log": failed}

    def killed(self, name: str) -> Path:
        """Return the directory of a run that was killed in its second epoch."""
        directory = self.folder / name
        assert self.train(directory, die=True)["code"] == -signal.SIGKILL
        return directory


def spoken(lines: list[str]) -> list[str]:
    """Return the lines of a guard, except those about skipped steps and bad rows."""
    steps = (" skipped ", " bad row")
    return [s for s in lines if s.startswith("NanGuard") and not any(word in s for word in steps)]


def _dies_in_second_epoch() -> None:
    real = Beat.on_train_batch_end

    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        real(self, batch, logs)
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == BATCHES + BATCHES // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Beat.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]


def failing(number: int, after: int) -> Callable[[], None]:
    """Return a context in which syncing a file fails with this error, after this many files."""

    def tampered() -> None:
        real, left = os.fsync, [after]

        def fsync(handle: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            real(handle)

        os.fsync = fsync

    return tampered


def set_back() -> None:
    """Set the clock of the process back by ten years."""
    real = time.time
    time.time = lambda: real() - 10 * 365 * 86400.0


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Yield a file system of this size. Takes root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def faults_of_disk(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fault and the result for disks that cannot be written to."""
    yield "the quota is used up after 30 files", case.train(case.folder / "quota", failing(122, 30))
    if os.geteuid() == 0 and sys.platform.startswith("linux"):
        with mounted(case.folder / "small", "100k") as disk:
            yield "a disk of 100 KB that fills up", case.train(disk / "run")
        with mounted(case.folder / "fixed", "4m") as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            yield "a directory that may only be read", case.train(disk / "run")
        left = case.killed("left")
        with mounted(case.folder / "turned", "4m") as disk:
            shutil.copytree(left, disk / "run")
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            yield "resumed from a directory that may only be read by now", case.train(disk / "run")


def faults_of_time(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the same for a clock that is set back, and for two processes on one directory."""
    directory = case.killed("clock")
    for number, path in enumerate(sorted(directory.rglob("*"), reverse=True)):
        os.utime(path, (1e9 + number, 1e9 + number))  # the newest is the oldest by its date
    yield "the clock set back ten years, dates of files in the wrong order", case.train(directory, set_back)
    shared, results = case.folder / "shared", [case.folder / f"two-{i}.npz" for i in range(2)]
    logs = [result.with_suffix(".log") for result in results]
    pids = [
        forked(lambda result=result: live(shared, result, mmap.mmap(-1, 1), 0.002), log)  # type: ignore[misc]
        for result, log in zip(results, logs)
    ]
    codes = [ended(pid) for pid in pids]
    said = [line for log in logs for line in spoken(log.read_text().splitlines())]
    whole = [read(path) for path in written(shared / "snapshots")]
    agree = all(result.exists() and same(case.whole, result) for result in results)
    yield "two processes on one directory at a time", {"code": max(codes), "said": said, "same": agree, "whole": len(whole), "log": ""}


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda b: None,
    "empty": lambda b: b"",
    "cut after 1 byte": lambda b: b[:1],
    "cut in half": lambda b: b[: len(b) // 2],
    "the last byte gone": lambda b: b[:-1],
    "the first byte changed": lambda b: _changed(b, 0),
    "a byte in the middle changed": lambda b: _changed(b, len(b) // 2),
    "the last byte changed": lambda b: _changed(b, len(b) - 1),
    "zeros": lambda b: bytes(len(b)),
    "a byte more": lambda b: b + b"x",
}


def _changed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]


def damages(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for each file of the newest good snapshot, whether each kind of damage is detected and
    the snapshot skipped.
    """
    left = case.killed("damaged")
    newest = find(left, BATCHES)
    assert newest is not None
    for file in ("state.npz", "snapshot.json", "guard_state.json"):
        for how, damage in DAMAGES.items():
            copy = case.folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(left, copy)
            path = copy / "snapshots" / (file if file == "guard_state.json" else f"{newest.path.name}/{file}")
            changed = damage(path.read_bytes())
            path.unlink() if changed is None else path.write_bytes(changed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = find(copy, BATCHES)
            older = found is not None and found.path.name < newest.path.name
            kept = found is not None and found.path.name == newest.path.name
            good = len(caught) == 1 and (kept if file == "guard_state.json" else older)
            yield f"{file}: {how}", {"code": 0, "said": [str(w.message) for w in caught], "same": good, "log": ""}
        yield f"{file}: a byte more, trained on", case.train(copy)
    file = "recording.sqlite"
    for how in ("cut in half", "zeros"):
        copy = case.folder / f"copy-{file}-{how}"
        shutil.copytree(left, copy)
        changed = DAMAGES[how]((copy / file).read_bytes())
        (copy / file).write_bytes(changed or b"")
        yield f"{file}: {how}, trained on", case.train(copy)


def faults() -> None:
    """Test all faults of disk, files and clock, and append the results to the log."""
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = never_killed(Path(folder))
        case = Case(Path(folder), whole)
        for part in (faults_of_disk, faults_of_time, damages):
            for what, came in part(case):
                said = [line.replace(folder, "").replace("//", "/") for line in came.pop("said")]
                append({"kind": "fault", "backend": keras.backend.backend(), "what": what, "said": said, **came, "versions": versions()})
