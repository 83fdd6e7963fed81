"""Checks while an untrusted file is read: no code, no access elsewhere, bounded memory and time."""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.parse import unquote

from keras_nanguard._core.errors import NanGuardError

__all__ = ["MEMORY", "PER_BYTE", "SECONDS", "SENTINEL", "Finding", "Watch", "Wrong", "check_page", "check_printed"]

MEMORY, PER_BYTE = 256 << 20, 48
"""Maximum memory for reading one input, in bytes, and the additional bytes per byte of the input.
"""

SECONDS = 10.0
"""Maximum processor time for reading one input, in seconds."""

LONGEST_MESSAGE = 4000
"""Maximum length of an error message, except those that list all problems of a policy."""

SENTINEL = "outside-7f3a9c"
"""The content of the files outside the folder of an input. No output may contain it."""

FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen", "pty.spawn"),
    *("pickle.find_class", "marshal.loads", "code.__new__", "ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function", "webbrowser.open"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "import", "os.putenv", "sqlite3.enable_load_extension"),
    *("sys.settrace", "sys.setprofile", "cpython.run_command", "cpython.run_file"),
)
"""Audit events (PEP 578) that no format needs."""

CHANGING = {
    **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.utime", "os.mkfifo", "os.mknod"), (0,)
    ),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copytree"), (0, 1)),
    **dict.fromkeys(("shutil.copyfile", "shutil.copymode", "shutil.copystat"), (1,)),
    **dict.fromkeys(("shutil.rmtree", "sqlite3.connect", "tempfile.mkstemp", "tempfile.mkdtemp"), (0,)),
}
"""Audit events that change files, and which of their arguments are paths."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Wrong(Exception):
    """Something that must not happen while a file is read."""


class OutOfTime(BaseException):
    """Raised within a reader that takes too long; no reader catches it."""


@dataclass(frozen=True)
class Finding:
    """One way in which reading an input failed a check.

    Attributes:
        oracle: the failed check: `error`, `code`, `write`, `read`, `memory`, `time`, `output`.
        where: the place in the package, which distinguishes findings of one kind.
        detail: what happened.
    """

    oracle: str
    where: str
    detail: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.oracle} at {self.where}: {self.detail}"


class Watch:
    """Runs readers one after the other and reports failed checks.

    Args:
        folder: the folder of the inputs; nothing outside of it may be read or written. The folder
            `outside` next to it has files that reveal such accesses.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(folder)
        self._roots = (os.path.realpath(folder) + os.sep,)
        own = {
            sys.prefix,
            sys.base_prefix,
            *(p for p in sys.path if p),
            str(Path(__file__).parents[1]),
            "/usr/share",
            "/proc",
            "/sys",
            "/dev",
        }
        self._readable = (*self._roots, *(os.path.realpath(p) + os.sep for p in own), "/etc/localtime")
        self._outside = self.folder.with_name("outside")
        self._armed = False
        self._seen: list[tuple[str, str]] = []
        wide = (f"utf-{bits}{order}" for bits in (16, 32) for order in ("", "-le", "-be"))
        for name in ("ascii", "latin-1", "unicode_escape", "utf-8-sig", *wide):
            codecs.lookup(name)  # loads a module on first use
        for name in ("writer", "recorder", "recording"):  # so does the package, some of its own
            importlib.import_module(f"keras_nanguard._recording.{name}")
        sys.addaudithook(self._hook)
        with contextlib.suppress(ValueError):  # not in the main thread: time is only measured, without interruption
            signal.signal(signal.SIGVTALRM, _out_of_time)

    def run(self, work: Callable[[], Any], size: int) -> list[Finding]:
        """Return the checks that failed while `work` read an input of this size in bytes."""
        self._seen.clear()
        found: list[Finding] = []
        there = self._beside()
        before = _peak(reset=True)
        began = time.process_time()
        try:
            with self._watched():
                work()
        except NanGuardError as error:
            found += _message(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except OutOfTime as error:
            found.append(Finding("time", _place(error), f"more than {SECONDS:g} s"))
        except BaseException as error:  # noqa: BLE001 (the finding)
            found.append(
                Finding("output" if isinstance(error, Wrong) else "error", f"{type(error).__name__} {_place(error)}", str(error)[:300])
            )
        took = time.process_time() - began
        grown = _peak() - before
        if (now := self._beside()) != there:  # by a library, which reports nothing
            found.append(Finding("write", "outside", f"{sorted(set(there) ^ set(now))}"))
        if took > SECONDS and not any(one.oracle == "time" for one in found):
            found.append(Finding("time", "the whole", f"{took:.1f} s"))
        if grown > MEMORY + PER_BYTE * size:
            found.append(Finding("memory", "the whole", f"{grown >> 20} MiB for {size} bytes"))
        return found + [Finding(oracle, what.partition("|")[0], what) for oracle, what in dict.fromkeys(self._seen)]

    def _beside(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of every file outside."""
        if not self._outside.is_dir():
            return []
        return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(self._outside))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the harness itself do things within a run that a reader may not do."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed or (event not in CHANGING and event not in FORBIDDEN and event not in ("open", "exec", "compile")):
            return
        self._armed = False  # these accesses are not the reader's
        try:
            self._note(event, args)
        finally:
            self._armed = True

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._note_open(*args)
        elif event == "compile":
            if args[1] not in ("<unknown>", None) and args[0] is not None:  # `ast.literal_eval`, which makes a tree and no code
                self._seen.append(("code", f"compile {args[1]}"))
        elif event == "exec":
            name = args[0].co_filename if isinstance(args[0], CodeType) else repr(args[0])
            self._seen.append(("code", f"exec {name}"))
        elif event == "subprocess.Popen" and args[1][1:] == ["-m", "keras_nanguard._files.worker"]:
            pass  # the process that reads a file
        elif event in FORBIDDEN:
            self._seen.append(("code", f"{event}|{args[0] if args else ''}"))
        else:
            for place in CHANGING[event]:
                path = args[place]
                if event in ("os.remove", "os.rmdir") and args[1] != -1:  # within a folder that is open, as `shutil.rmtree` does it
                    path = os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), os.fsdecode(path))
                in_memory = event == "sqlite3.connect" and path == ":memory:"
                if isinstance(path, (str, bytes, os.PathLike)) and not in_memory and not self._inside(path, self._roots):
                    self._seen.append(("write", f"{event}|{os.fsdecode(path)}"))

    def _note_open(self, path: Any, mode: Any, flags: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or os.fsdecode(path) == os.devnull:
            return
        writing = bool(flags & _WRITING) if isinstance(flags, int) else any(letter in str(mode) for letter in "wax+")
        if not self._inside(path, self._roots if writing else self._readable):
            self._seen.append(("write" if writing else "read", f"open|{os.fsdecode(path)}"))

    def _inside(self, path: Any, roots: tuple[str, ...]) -> bool:
        try:
            name = os.fsdecode(path)
            name = unquote(name.removeprefix("file://").partition("?")[0]) if name.startswith("file://") else name
            real = os.path.realpath(name)
        except ValueError:  # a NUL, which no file has
            return True
        return any(real.startswith(root) or real + os.sep == root or real == root for root in roots)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def _place(error: BaseException) -> str:
    """Return the last line of the package in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "keras_nanguard" in f.filename and "campaigns" not in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{'/'.join(Path(last.filename).parts[-2:])}:{last.name}"


def _message(error: NanGuardError) -> list[Finding]:
    text = str(error)
    if len(text) > LONGEST_MESSAGE and not getattr(error, "problems", ()):
        return [Finding("output", f"message {_place(error)}", f"{len(text)} characters")]
    if bad := _unprintable(text):
        return [Finding("output", f"message {_place(error)}", f"{bad!r} in {text[:200]!r}")]
    return []


def _peak(reset: bool = False) -> int:
    """Return the largest resident memory since the last reset, in bytes."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def _unprintable(text: str) -> str:
    if text.isprintable():
        return ""
    return next((c for c in text if c not in "\n\t" and (unicodedata.category(c) in ("Cc", "Cs") or c in _BIDIRECTIONAL)), "")


def check_printed(text: str, where: str) -> None:
    """Check that a text can be printed: it does not control a terminal, and contains nothing from
    outside.

    Raises:
        Wrong: if not.
    """
    if bad := _unprintable(text):
        at = text.index(bad)
        raise Wrong(f"{where}: the character {bad!r} in {text[max(0, at - 40) : at + 40]!r}")
    if SENTINEL in text:
        raise Wrong(f"{where}: text of a file outside the folder")
    if "Traceback (most recent call last)" in text:
        raise Wrong(f"{where}: a traceback: {text[-300:]!r}")


class _Markup(HTMLParser):
    """Counts scripts, and collects all active elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts, self.acting = 0, set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag in ("iframe", "object", "embed", "base", "form", "link", "foreignobject", "animate", "set", "meta"):
            self.acting.add(f"<{tag} {sorted(attrs, key=str)}>")
        for name, value in attrs:
            target = (value or "").strip().lower()
            if name.startswith("on") or name in ("srcdoc", "formaction", "action", "xlink:href"):
                self.acting.add(f"{tag} {name}")
            if name in ("href", "src") and not target.startswith(("#", "data:image/png;base64,")):
                self.acting.add(f"{tag} {name}={target[:40]}")

    handle_startendtag = handle_starttag


def check_page(page: str, plain: str) -> None:
    """Check that an HTML page has only the active elements of a page of a run with plain names.

    Raises:
        Wrong: if it has others.
    """
    if (found := _acting(page)) != (usual := _acting(plain)):
        raise Wrong(f"page: {found[0]} scripts in place of {usual[0]}, {sorted(found[1] - usual[1])}")
    if SENTINEL in page:
        raise Wrong("page: text of a file outside the folder")


@functools.lru_cache(4)
def _acting(page: str) -> tuple[int, set[str]]:
    markup = _Markup()
    markup.feed(page)
    markup.close()
    return markup.scripts, markup.acting
