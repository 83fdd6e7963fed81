"""How much memory of the host this process may still take: what nobody uses, and what its limits leave of that.

Looked at are the memory of the machine, the cgroups that the process is in (the limit of a container), and its own limits
(`ulimit -v`, `ulimit -d`). Whatever cannot be read counts as no limit. Imports no backend.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

__all__ = ["SMALL", "is_exhausted", "readable", "room", "room_for"]

SMALL = 64 << 20
"""Bytes that are taken without a look: as many as the batches that are remembered may take."""

RESERVE = 256 << 20
"""Bytes that are left to whatever comes later: a validation, a checkpoint, another program that is compiled."""

LARGE = 1 << 20
"""Bytes of a block from which on it is given back when it is freed, where memory is short."""

_M_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of `malloc.h`."""

_EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED|ResourceExhausted|out of memory|not enough memory|bad_alloc|can't allocate memory", re.I)


def room(root: Path = Path("/")) -> float:
    """Return how many bytes may be taken for good; infinity where that is not known.

    That is what is free, less what the process has needed at its peak beyond what it holds now: the next step needs it again.

    Args:
        root: where the files of the system are; another folder in tests.
    """
    status = _numbers(root / "proc/self/status")
    peak = status.get("VmHWM", 0) - status.get("VmRSS", 0)
    free = min(_of_machine(root), *_of_cgroups(root), *_of_process(status, "DATA", "VmData"), inf)
    spaces = [space - max(status.get("VmPeak", 0) - status.get("VmSize", 0), 0) for space in _of_process(status, "AS", "VmSize")]
    return min(free - max(peak, 0), *spaces, inf)


def room_for(size: float) -> bool:
    """Whether so many bytes may be taken, and enough is left.

    Where they may not, the C library first gives back what is free in it, and from then on each large block as soon as it is freed.
    """
    needed = size + max(RESERVE, size / 4)
    if size <= SMALL or needed <= room():
        return True
    _give_back()
    return needed <= room()


def _give_back() -> None:
    """Have glibc give memory that was freed back to the system, also that of other threads; elsewhere do nothing.

    By itself it keeps blocks of up to 32 MB in the end, each thread its own, and finds little use for them: see `man mallopt`.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE)
        library.malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library
        pass


def is_exhausted(error: BaseException) -> bool:
    """Whether an exception of Python or of a backend says that there is no memory left."""
    return isinstance(error, MemoryError) or _EXHAUSTED.search(f"{type(error).__name__}: {error}") is not None


def readable(size: float) -> str:
    """Return a number of bytes as a person reads it."""
    return f"{size / (1 << 30):.1f} GB" if size >= 1 << 30 else f"{max(size, 0) / (1 << 20):.0f} MB"


def _of_machine(root: Path) -> float:
    """Return what is available on the machine, by Linux' own estimate; elsewhere by psutil, where that is installed."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable")
    if available is None and not sys.platform.startswith("linux"):
        try:
            import psutil

            return float(psutil.virtual_memory().available)
        except Exception:  # noqa: BLE001  not installed, or not able to
            return inf
    return inf if available is None else available


def _of_process(status: dict[str, int], limit: str, used: str) -> list[float]:
    """Return what one of the process' own limits leaves."""
    try:
        import resource

        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{limit}"))
        return [float(soft - status[used])] if soft != resource.RLIM_INFINITY else []
    except (ImportError, AttributeError, OSError, ValueError, KeyError):
        return []


def _of_cgroups(root: Path) -> list[float]:
    """Return what each cgroup leaves that the process is in and that limits memory, those above it included."""
    free = []
    for folder in _cgroup_folders(root):
        for limit, usage, cache in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                stat = _numbers(folder / "memory.stat")
                free.append(float(most - used + sum(stat.get(name, 0) for name in cache)))  # the cache goes where memory is needed
    return free


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups of this process for memory, from its own up to the highest that can be seen."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers or "memory" in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), (after.split() or [""])[0]
        if kind not in own or len(fields) < 5 or (kind == "cgroup" and "memory" not in after.rpartition(" ")[2].split(",")):
            continue
        top = root / fields[4].lstrip("/")
        inner = own[kind][len(fields[3].rstrip("/")) :] if own[kind].startswith(fields[3]) else ""
        folder = top / inner.strip("/")
        while folder != top and top in folder.parents:
            yield folder
            folder = folder.parent
        yield top


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file, `None` where there is none: no file, or no limit."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file of names and values, in bytes."""
    found = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    return found
