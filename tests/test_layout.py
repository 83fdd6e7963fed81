"""The architecture, read off the imports: no cycles, no backend at the bottom, Keras' insides in a few files.

Modules are named by how their names end, so that one may move into a package of its own.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "keras_nanguard"

BOTTOM = (
    *("errors", "incident", "actions", "probes", "_step.verdict", "reports.console", "fields", "trend", "documents"),
    *("policy", "rules", "conditions", "settings", "ledger", "ending", "config", "rule_files", "schema", "explain"),
)
"""Modules that know neither Keras nor a backend; those of policy also where they stand in a package of that name."""

BACKENDS = ("tensorflow", "jax", "torch")
HOMES = {
    "tensorflow": ("_step.*", "_attach.*", "_diagnose.*", "replay"),
    "torch": ("reestimate", "processes", "_step.*", "_attach.*", "_diagnose.*"),
    "jax": ("processes", "_step.*", "_attach.*", "_diagnose.*"),
}
"""Where a backend may be imported."""

PRIVATE = ("state", "internals", "_step.faults", "_step.faults_jax", "_step.jax_trainer", "_step.torch_journal")
"""Where names private to Keras belong."""

DEBT = {
    "live": {"_flatten_layers"},
    "rates": {"_get_current_learning_rate", "_learning_rate"},
    "counterfactuals": {"_get_current_learning_rate"},
    "_diagnose.facts": {"_trainable_variables"},
    "_lint.*": {
        *("_compile_metrics", "_fn_kwargs", "_functional", "_inbound_nodes", "_keras_history"),
        *("_learning_rate", "_user_metrics"),
    },
}
"""Names private to Keras that are used elsewhere today. Shorten it; nothing may be added."""

NOT_OF_KERAS = {
    *("_getframe", "_current_frames", "_exit", "_SubParsersAction", "_actions"),  # Python
    *("_id", "_rng", "_jit_compile", "_handle_data"),  # TensorFlow
    "_trace",  # JAX
    *("_cdata", "_schema", "_version", "_foreach_norm", "_opt_called", "_torchdynamo_orig_callable"),  # PyTorch
    *("_session", "_fields", "_asdict", "_replace"),  # our own, named tuples
}

LINES = 400
VAGUE = {"utils", "util", "base", "manager", "helpers", "common", "misc"}


class Import(NamedTuple):
    name: str
    at_load: bool


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def _nodes(node: ast.AST, at_load: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node with whether it runs as the module is loaded."""
    for child in ast.iter_child_nodes(node):
        here = at_load and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            here = False
        yield child, here
        yield from _nodes(child, here)


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    """Return all imports of a module, with the full names of what they bring."""
    found = []
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    for node, at_load in _nodes(tree(module)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, at_load) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.append(Import(full if full in modules() else source, at_load))
    return tuple(found)


def tail(module: str) -> str:
    """Return the name after the package's, with no underscore before its last part."""
    parts = module.split(".")[1:] or [""]
    return ".".join([*parts[:-1], parts[-1].lstrip("_")])


def is_one_of(module: str, names: tuple[str, ...] | dict) -> bool:
    return any(_fits(module, name) for name in names)


def _fits(module: str, name: str) -> bool:
    if name.endswith(".*"):
        return name[1:-2].lstrip("_") in [part.lstrip("_") for part in module.split(".")]
    mine, wanted = f".{tail(module)}", name.split(".")
    return mine.replace("._", ".").endswith("." + ".".join(part.lstrip("_") for part in wanted))


def bottom() -> list[str]:
    """Return the modules that may know no backend."""
    return [m for m in modules() if is_one_of(m, BOTTOM) or ".policy." in m or "._policy." in m]


def test_the_rules_find_modules():
    """Every rule of this file is about a module that is there: none has lost its subject in a move."""
    for name in {*BOTTOM, *PRIVATE, *DEBT, *HOMES["tensorflow"]}:
        found = [m for m in modules() if _fits(m, name)]
        assert found or name in {"policy", "rules"}, f"no module is called {name}"


def test_no_cycles():
    """No module needs, to be loaded, a module that needs it; imports within functions are no part of that."""
    edges = {m: {i.name for i in imports(m) if i.at_load and i.name in modules()} - {m} for m in modules()}
    done: set[str] = set()
    cycles: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            cycles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(edges[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())
    assert cycles == []


def test_bottom_imports_nothing_above():
    """The bottom imports neither Keras nor a backend, and of our own modules only such as do not either."""
    above: dict[str, str] = {}

    def reaches(module: str, seen: set[str]) -> str:
        for name, at_load in imports(module):
            if at_load and name.partition(".")[0] in ("keras", *BACKENDS):
                return f"{module} imports {name}"
            if at_load and name in modules() and name not in seen:
                seen.add(name)
                if found := reaches(name, seen):
                    return found
        return ""

    for module in ["keras_nanguard", *bottom()]:
        if found := reaches(module, {module}):
            above[module] = found
    assert above == {}


@pytest.mark.parametrize("what", ["package", "bottom"])
def test_loads_no_backend(what):
    """Loading the package, or all of its bottom, loads no Keras and no backend."""
    names = ["keras_nanguard"] if what == "package" else bottom()
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print([m for m in ('keras', 'tensorflow', 'jax', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_stay_at_home(backend):
    """A backend is imported only where its part of the step, of the diagnosis or of the loop is."""
    found = [m for m in modules() for i in imports(m) if i.name.partition(".")[0] == backend]
    assert [m for m in found if not is_one_of(m, HOMES[backend])] == []


def _keras_src(module: str) -> bool:
    used = any(i.name.startswith("keras.src") for i in imports(module))
    spelled = (n for n, _ in _nodes(tree(module)) if isinstance(n, ast.Attribute) and n.attr == "src")
    return used or any(isinstance(n.value, ast.Name) and n.value.id == "keras" for n in spelled)


def test_keras_src():
    """`keras.src` is used only in the files that know Keras' insides."""
    assert [m for m in modules() if _keras_src(m) and not is_one_of(m, PRIVATE)] == []


def _private(module: str) -> set[str]:
    """Return the names with one underscore before them that a module reads from other objects than its own."""
    names = set()
    aliases = {i.name.rpartition(".")[2] for i in imports(module) if i.name in modules()}
    defined = {n.name for n, _ in _nodes(tree(module)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node, _ in _nodes(tree(module)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls", *aliases}:
                names.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and node.args[1:]:
            names.add(getattr(node.args[1], "value", ""))
    single = {n for n in names if isinstance(n, str) and re.match(r"_[a-z]", n)}
    return single - defined - NOT_OF_KERAS


def test_names_private_to_keras():
    """No module uses a name private to Keras but the files that know its insides, and what is listed as debt."""
    found = {}
    for module in modules():
        allowed = set().union(*(names for name, names in DEBT.items() if _fits(module, name)))
        if not is_one_of(module, PRIVATE) and (more := _private(module) - allowed):
            found[module] = sorted(more)
    assert found == {}


def test_length():
    """No module has more than 400 lines."""
    lengths = {m: len(path.read_text(encoding="utf-8").splitlines()) for m, path in modules().items()}
    assert {m: n for m, n in lengths.items() if n > LINES} == {}


def test_names_that_say_nothing():
    """No module is called after nothing in particular."""
    assert [m for m in modules() if set(m.replace("._", ".").split(".")) & VAGUE] == []
