"""Runs tests against mutants: collects once, then forks a process for each mutant.

In the process the functions get their mutated code. It runs only the tests that execute the mutated
line, the shortest first, up to the first failure, and does not start Keras again. If the mutated
code is not part of a function (a constant, a default, a table), the process imports the package and
the tests again.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.mutants import PACKAGE, Mutant, header

__all__ = ["Runs", "notices", "run", "swapped"]

@dataclass(frozen=True)
class Tested:
    """One test on the original code: processor seconds, the lines of each module that it executes,
    whether it passes.
    """

    name: str
    seconds: float
    lines: dict[str, list[int]]
    passes: bool


class Runs:
    """A plugin of pytest that runs mutants instead of the tests, and appends the result of each to
    a file of JSON lines.

    Args:
        modules: the modules that are mutated.
        mutants: the mutants.
        folder: where results are appended, and the lines of each test are stored for the next time.
        budget: maximum processor seconds of tests for one mutant.
        known: the keys of mutants that need not run again.
    """

    def __init__(
        self, modules: Sequence[str], mutants: Sequence[Mutant], folder: Path, name: str, budget: float, known: Iterable[str] = ()
    ):
        self.modules, self.mutants, self.budget, self.known = modules, mutants, budget, set(known)
        self.kept, self.results = folder / f"{name}.tests", folder / f"{name}.results"

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "xdist_group(name): of a plugin that does not run here")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:  # each mutant would count as detected
            raise session.Interrupted(f"{session.testsfailed} errors in collecting the tests")
        items = {item.nodeid: item for item in session.items}
        _prepare(self.modules)
        tests = self._tested(session, items)
        for mutant in self.mutants:
            if mutant.key in self.known:
                continue
            chosen = _chosen(mutant, tests, self.budget)
            spent = sum(test.seconds for test in chosen)
            if not chosen:
                outcome = {"outcome": "not run", "by": "", "seconds": 0.0}
            else:
                outcome = _forked(session, mutant, items, [test.name for test in chosen], spent)
            result = {"key": mutant.key, "module": mutant.module, "function": mutant.function, "operator": mutant.operator}
            result |= {"line": mutant.line, "before": mutant.before, "after": mutant.after, **outcome, "tests": len(chosen)}
            with self.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        return True

    def _tested(self, session: pytest.Session, items: dict[str, pytest.Item]) -> list[Tested]:
        """Return the lines of each test, as far as they are known from a run on the same modules.
        """
        digest = hashlib.sha256(b"".join((PACKAGE / module).read_bytes() for module in self.modules)).hexdigest()
        first, *lines = self.kept.read_text("utf-8").splitlines() if self.kept.exists() else [""]
        known = {found["name"]: Tested(**found) for found in map(json.loads, lines)} if first == digest else {}
        if not known:
            self.kept.write_text(f"{digest}\n", "utf-8")
        with self.kept.open("a", encoding="utf-8") as file:
            for name, item in items.items():
                if name not in known:
                    known[name] = self._one(session, item)
                    file.write(json.dumps(vars(known[name])) + "\n")
                    file.flush()
        return [known[name] for name in items if known[name].passes]

    def _one(self, session: pytest.Session, item: pytest.Item) -> Tested:
        files = {str(PACKAGE / module): module for module in self.modules}

        def run(report: Callable[[Any], None]) -> None:
            measured = coverage.Coverage(include=list(files), data_file=None, config_file=False)
            measured.start()
            begin = time.process_time()
            failed = _run(session, [item])
            took = round(time.process_time() - begin, 3)
            measured.stop()
            data = measured.get_data()
            lines = {files[file]: data.lines(file) for file in data.measured_files()}
            report({"by": failed, "lines": lines, "took": took})

        found = _child(run, 1e6)
        return Tested(item.nodeid, found.get("took", 0.0), found.get("lines", {}), found["outcome"] == "survived")


def _chosen(mutant: Mutant, tests: Iterable[Tested], budget: float) -> list[Tested]:
    """Return the tests that execute the statement of a mutant, the shortest first, within the
    budget.
    """
    tests = list(tests)
    tree = ast.parse((PACKAGE / mutant.module).read_text("utf-8"))
    first, last = header(tree, mutant.line)
    if swapped(mutant) is not None:
        found = [test for test in tests if not set(range(first, last + 1)).isdisjoint(test.lines.get(mutant.module, ()))]
    else:  # executed on import: by every test of a file that uses the module
        files = {test.name.partition("::")[0] for test in tests if mutant.module in test.lines}
        found = [test for test in tests if test.name.partition("::")[0] in files]
    chosen: list[Tested] = []
    for test in sorted(found, key=lambda test: test.seconds):
        budget -= test.seconds
        if chosen and budget < 0:
            break
        chosen.append(test)
    return chosen


IMPORTED = ("_policy/policy.py",)
"""Modules whose functions run while others are imported, so that replacing their code is too late.
"""


def swapped(mutant: Mutant) -> list[tuple[FunctionType, CodeType]] | None:
    """Return the functions that a mutant changes, each with its mutated code; `None` if it changes
    more than functions.
    """
    if mutant.module in IMPORTED:
        return None
    module = import_module(_name(mutant.module))
    path = str(module.__file__)
    before, after = (compile(source, path, "exec", dont_inherit=True) for source in (_source(mutant.module), mutant.source()))
    pairs = dict(_pairs(before, after))
    if None in pairs.values() or not pairs:
        return None
    found = [(f, after) for f in _functions(module.__name__) if (after := pairs.get(f.__code__)) is not None]
    alike = all(len(f.__code__.co_freevars) == len(after.co_freevars) for f, after in found)
    return found if alike and {f.__code__ for f, _ in found} == set(pairs) else None


def _pairs(before: CodeType, after: CodeType) -> Iterable[tuple[CodeType, CodeType | None]]:
    """Yield the code of each function that differs, with `None` if code outside of functions
    differs.
    """
    one, other = ([const for const in code.co_consts if isinstance(const, CodeType)] for code in (before, after))
    plain = [[const for const in code.co_consts if not isinstance(const, CodeType)] for code in (before, after)]
    if len(one) != len(other) or repr(plain[0]) != repr(plain[1]) or (before.co_code, before.co_names) != (after.co_code, after.co_names):
        yield before, None
        return
    for first, second in zip(one, other):
        if first.co_flags & 0x2:  # CO_NEWLOCALS: a function, not the body of a class
            if first != second:
                yield first, second
        else:
            yield from _pairs(first, second)


_FOUND: dict[str, list[FunctionType]] = {}
"""The functions of each module."""


def _functions(module: str) -> list[FunctionType]:
    if module not in _FOUND:
        frozen = gc.get_freeze_count()
        gc.unfreeze()  # frozen objects are not listed
        _FOUND[module] = [f for f in gc.get_objects() if type(f) is FunctionType and f.__module__ == module]
        if frozen:
            gc.freeze()
    return _FOUND[module]


def _prepare(modules: Iterable[str]) -> None:
    """Import everything that the children need, and exclude it from garbage collection, which would
    copy it in each child.
    """
    if "keras" in sys.modules:
        for path in sorted(PACKAGE.rglob("*.py")):
            if path.stem not in ("__init__", "__main__"):
                with contextlib.suppress(ImportError):  # of another backend
                    import_module(_name(str(path.relative_to(PACKAGE))))
    for module in modules:
        _functions(_name(module))
    gc.collect()
    gc.freeze()


def _name(module: str) -> str:
    return "keras_nanguard." + module.removesuffix(".py").replace("/", ".")


def _source(module: str) -> str:
    return (PACKAGE / module).read_text("utf-8")


def _swap(codes: Iterable[tuple[FunctionType, CodeType]]) -> None:
    for function, code in codes:
        function.__code__ = code


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> str:
    """Run tests up to the first that fails, and return its name, `""` if none fails."""
    for item, following in zip(items, [*items[1:], None]):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return item.nodeid
    return ""


def _forked(
    session: pytest.Session, mutant: Mutant, items: dict[str, pytest.Item], names: Sequence[str], expected: float
) -> dict[str, Any]:
    """Run tests against a mutant in a separate process."""
    codes = swapped(mutant)

    def run(report: Callable[[Any], None]) -> None:
        if codes is None:
            chosen = _anew(session, mutant, names, items)
            report({"by": "when it is imported" if session.testsfailed else _run(session, chosen)})
        else:
            _swap(codes)
            report({"by": _run(session, [items[name] for name in names])})

    return _child(run, expected)


def _child(run: Callable[[Callable[[Any], None]], None], expected: float) -> dict[str, Any]:
    """Run a function in a forked process with a limit of processor time, a multiple of the expected
    one; return its report.
    """
    folder = tempfile.mkdtemp(prefix="mutant-")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
            most = int(10 + 5 * min(expected, 1e5))
            resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (3 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            run(lambda found: os.write(writing, json.dumps(found).encode()))
        except BaseException as error:  # noqa: BLE001
            os.write(writing, json.dumps({"by": f"{type(error).__name__}: {error}"[:200]}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    found, late = b"", time.monotonic() + 1200 + 50 * min(expected, 1e4)
    while select.select([reading], [], [], max(0.0, late - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 20)
        if not piece:
            break
        found += piece
    else:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    os.close(reading)
    shutil.rmtree(folder, ignore_errors=True)
    result = json.loads(found) if found else {"by": ""}
    outcome = "killed" if result["by"] else "survived" if found else "timeout" if _late(status) else "killed"
    by = result.pop("by") or ("" if found else f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended")
    return {"outcome": outcome, "by": by, "seconds": round(used.ru_utime + used.ru_stime, 3), **result}


def _late(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)


def _anew(session: pytest.Session, mutant: Mutant, names: Sequence[str], known: Iterable[str]) -> list[pytest.Item]:
    """Import the package and its tests again, with one module mutated; return the tests with these
    names, and new ones.
    """
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.name != "conftest.py" and any(file.is_relative_to(folder) for folder in (PACKAGE, PACKAGE.parent / "tests")):
            del sys.modules[name]
    mutated, source, original = _name(mutant.module), mutant.source(), SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return compile(source, self.path, "exec", dont_inherit=True) if fullname == mutated else original(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    place, before = {name: number for number, name in enumerate(names)}, set(known)
    found = session.perform_collect([*dict.fromkeys(name.partition("::")[0] for name in names)])
    chosen = [item for item in found if item.nodeid in place or item.nodeid not in before]  # a parameter may have another value
    return sorted(chosen, key=lambda item: place.get(item.nodeid, len(place)))


def notices(mutant: Mutant, test: Callable[[], None]) -> bool:
    """Return whether a test fails on a mutant of functions, in this process. The functions are
    restored afterwards.
    """
    codes = swapped(mutant)
    assert codes is not None, "a mutant of functions"
    originals = [(function, function.__code__) for function, _ in codes]
    _swap(codes)
    try:
        test()
    except BaseException:  # noqa: BLE001
        return True
    finally:
        _swap(originals)
    return False


def _quick() -> None:
    """Let hypothesis draw the same examples each time, and neither shrink nor remember a failure."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
    settings.load_profile("mutants")


def run(arguments: Sequence[str], plugins: Sequence[Any] = ()) -> int:
    """Run pytest with the options for mutants."""
    _quick()
    return int(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--nightly", "-m", "not slow", *arguments], plugins=list(plugins)))
