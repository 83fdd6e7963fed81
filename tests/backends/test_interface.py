"""Backend and host have what `_backends/interface.py` declares, and use nothing else."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import keras
import pytest

from keras_nanguard._backends import interface
from keras_nanguard._core.errors import BACKENDS

PACKAGE = Path(__file__).parents[2] / "keras_nanguard"
OURS = f"keras_nanguard._backends.{keras.backend.backend()}"

CLASSES = {
    "Replay": [f"{OURS}.replay.Replay"],
    "Host": [f"{OURS}.host.Host"],
    "StateAccess": [
        *(f"{OURS}.attach.ModelAttachment", f"{OURS}.attach.LoopStep"),
        "keras_nanguard._backends.shared.attach.Attachment",
    ],
    "Transaction": [f"{OURS}.step.Transaction"],
    "Run": ["keras_nanguard._fit.run.Run"],
    "Session": ["keras_nanguard._fit.session.Session"],
    "Recovery": ["keras_nanguard._fit.recovery.Recovery"],
    "Agreement": ["keras_nanguard._fit.agreement.Agreement"],
    "Logs": ["keras_nanguard._fit.callbacks.FitLogs"],
}
"""The classes that implement a declared one, in a backend or in the host."""


HELD = {"transaction", "attachment", "_attachment", "hook", "_hook", "placed"}
"""The names under which the rest of the library uses parts of a backend."""


def found(place):
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def declared(name):
    """Return the attributes and methods that a class of the interface declares."""
    kind = getattr(interface, name)
    attributes = dict.fromkeys(kind.__annotations__)
    return attributes | {n: v for n, v in vars(kind).items() if not n.startswith("_")}


def has(kind, name):
    """Whether a class has this attribute: its own, inherited, or assigned by a method."""
    known = [one for one in kind.__mro__ if one.__module__.startswith("keras_nanguard")]
    assigned = re.compile(rf"\bself\.{name}\b[^=\n]*=(?!=)")
    return hasattr(kind, name) or any(
        name in inspect.get_annotations(one) or assigned.search(inspect.getsource(one))
        for one in known
        if one.__module__ != interface.__name__
    )


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, places in CLASSES.items() for place in places]
)
def test_classes(name, place):
    """A class has every declared attribute, and its methods accept every declared call."""
    kind = found(place)
    for member, wanted in declared(name).items():
        assert has(kind, member), member
        if not inspect.isfunction(wanted):
            continue
        parameters = [p for p in inspect.signature(wanted).parameters.values() if p.name != "self"]
        method = inspect.signature(getattr(kind, member))
        static = isinstance(inspect.getattr_static(kind, member), staticmethod)
        itself = [] if static else [None]
        needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
        method.bind(*itself, *needed)
        if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
            method.bind(*itself, **{p.name: None for p in parameters})


@pytest.mark.parametrize("name", ["attach.ModelAttachment", "replay.Replay", "Host", "faults.Hook"])
def test_nothing_is_left_out(name):
    """A class of a backend overrides every method that its base only declares."""
    (place,) = CLASSES.get(name, [f"{OURS}.{name}"])
    kind = found(place)
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    assert [n for n, one in methods.items() if "raise NotImplementedError" in inspect.getsource(one)] == []


def test_every_declared_class_is_tested():
    """All but the records, which nobody implements."""
    kinds = [kind for _, kind in inspect.getmembers(interface, inspect.isclass) if not dataclasses.is_dataclass(kind)]
    assert {kind.__name__ for kind in kinds if kind.__module__ == interface.__name__} == set(CLASSES)


@functools.cache
def outside() -> dict[str, ast.Module]:
    """Return the modules of the library outside of `_backends`."""
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if "_backends" not in p.relative_to(PACKAGE).parts]
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in paths]
    return {name: ast.parse(p.read_text(encoding="utf-8")) for name, p in zip(names, paths)}


def test_only_current_imports_backends():
    """Only `current`, which selects one, imports the packages of the backends."""
    packages = tuple(f"keras_nanguard._backends.{backend}" for backend in BACKENDS)
    reached = []
    for module, syntax in outside().items():
        for node in ast.walk(syntax):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), module if node.level else None)
                names = [f"{source}.{alias.name}" for alias in node.names]
            reached += [(module, name) for name in names if name.startswith(packages)]
    assert reached == []


def test_only_declared_attributes_are_used():
    """Nor does `getattr` read others of a transaction."""
    known, wrong = declared("Transaction"), []
    for module, syntax in outside().items():
        for node in ast.walk(syntax):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "vars"):
                guessed = ast.unparse(node.args[0]).rpartition(".")[2] in HELD
                wrong += [(module, ast.unparse(node))] if guessed else []
            elif isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value).rpartition(".")[2]
                undeclared = owner == "transaction" and node.attr not in known
                wrong += [(module, ast.unparse(node))] if undeclared else []
    assert wrong == []


def test_no_backend_uses_undeclared_attributes():
    """A backend reads only declared attributes of a session, of its run, and of their parts."""
    declares = {"session": "Session", "run": "Run", "recovery": "Recovery", "agreement": "Agreement", "logs": "Logs"}
    read, wrong = set(), []
    for path in sorted((PACKAGE / "_backends").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value)
            names = owner.split(".")
            part, of_step = names[-1], path.name in ("attach.py", "step.py", "trace.py", "execution.py")
            of_host = "session" in names[:2] or ("run" in names and of_step)
            if part in declares and (of_host or part in ("agreement", "recovery")):
                read.add((part, node.attr))
                wrong += [] if node.attr in declared(declares[part]) else [(path.name, ast.unparse(node))]
    assert wrong == []
    assert read == {(part, member) for part, name in declares.items() for member in declared(name)}
