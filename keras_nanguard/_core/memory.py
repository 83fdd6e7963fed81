"""Whether a copy fits into the memory of the host.

The limits are those of the machine and of the cgroups of the process (the limit of a container). A
limit that cannot be read is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from pathlib import Path

SMALL = 64 << 20
"""Bytes that are allocated without a check: the limit of the remembered batches."""

RESERVE = 256 << 20
"""Bytes that are kept free for later needs: a validation, a checkpoint, another compilation."""

CGROUPS = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        *("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Folder, controller, limit, usage and cache of the cgroups of version 2 and 1; see Linux'
cgroups(7).
"""

_EXHAUSTED = re.compile(
    r"RESOURCE_EXHAUSTED|ResourceExhausted|out of memory|not enough memory|bad_alloc"
    r"|can't allocate memory",
    re.I,
)


def room_for(size: float) -> bool:
    """Whether this many bytes can be allocated permanently, with enough memory left."""
    return size <= SMALL or size + max(RESERVE, size / 4) <= room()


def room(root: Path = Path("/")) -> float:
    """Return the number of bytes that can be allocated permanently; infinity if unknown.

    This is the free memory, minus the difference between the peak and the current use of the
    process, because the next step needs that memory again.

    Args:
        root: root of the file system; another folder in tests.
    """
    status = _numbers(root / "proc/self/status")
    again = max(status.get("VmHWM", 0) - status.get("VmRSS", 0), 0)
    available = _numbers(root / "proc/meminfo").get("MemAvailable", inf)
    return min([available, *_of_cgroups(root)]) - again


def is_exhausted(error: BaseException) -> bool:
    """Whether an exception of Python or of a backend means that no memory is left."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or _EXHAUSTED.search(text) is not None


def readable(size: float) -> str:
    """Return a number of bytes as text in GB or MB."""
    return f"{size / (1 << 30):.1f} GB" if size >= 1 << 30 else f"{max(size, 0) / (1 << 20):.0f} MB"


def _of_cgroups(root: Path) -> Iterator[float]:
    """Yield the free memory of each cgroup of this process, and of those above it.

    The cache of files counts as free, because the kernel releases it if memory is needed.
    """
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for name, controller, limit, usage, cache in CGROUPS:
        top = root / name
        paths = [line[2] for line in lines if line[2:] and controller in line[1].split(",")]
        own = [top / path.strip("/") for path in paths]
        above = {folder for one in own for folder in one.parents if top in folder.parents}
        for folder in {top, *own, *above}:
            most, used = (_numbers(folder / file).get("") for file in (limit, usage))
            if most is not None and used is not None:
                stat = _numbers(folder / "memory.stat")
                yield float(most - used + sum(stat.get(part, 0) for part in cache))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file of names and values, in bytes; a single number has the name
    `""`.
    """
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        name, value = words[:2] if len(words) > 1 else ("", *words, "")[:2]
        if value.isdigit():
            found[name] = int(value) << (10 if words[2:] == ["kB"] else 0)
    return found
