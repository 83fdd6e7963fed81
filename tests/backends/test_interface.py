"""Every backend holds what `_backends/interface.py` declares, and nothing outside of `_backends` reaches past it.

Read off the source, so that no backend has to be installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "keras_nanguard"
BACKENDS = ("tensorflow", "jax", "torch")
INTERFACE = "keras_nanguard._backends.interface"

CLASSES = {
    "Replay": ["replay.Replay"],
    "Host": ["host.Host"],
    "StateAccess": ["attach.ModelAttachment", "attach.LoopStep"],
    "Transaction": ["step.Transaction"],
}
"""The classes that implement a protocol."""

ONLY = {
    "StateAccess": "keras_nanguard._backends.shared.attach.Attachment",
}
"""What is implemented once."""

SAME_NAMES = ("intercept", "execution", "reductions", "origins", "faults")
"""Modules of which nothing outside of the backend knows, and which each backend has."""

HELD = {"transaction", "attachment", "_attachment", "hook", "_hook", "placed"}
"""How the rest of the library calls what belongs to a backend."""


Members = dict[str, "ast.AST | None"]


@dataclass(frozen=True)
class Parameters:
    """What a function can be called with."""

    places: tuple[str, ...]
    """Of its positional parameters; empty strings for those that have no name for the caller."""

    optional: frozenset[str]
    takes_more: bool

    @classmethod
    def of(cls, function: ast.FunctionDef, method: bool) -> Parameters:
        spec = function.args
        bound = method and not any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
        places = [*("" for _ in spec.posonlyargs), *(a.arg for a in spec.args)][bound:]
        optional = places[len(places) - len(spec.defaults) :] if spec.defaults else []
        keywords = [a.arg for a, default in zip(spec.kwonlyargs, spec.kw_defaults) if default is not None]
        return cls(tuple(places), frozenset([*optional, *keywords]), spec.vararg is not None)


@functools.cache
def tree(module: str) -> ast.Module:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def exists(module: str) -> bool:
    return PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").exists()


@functools.cache
def imported(module: str) -> dict[str, str]:
    """Return where each name that a module imports at its top comes from."""
    nodes = [node for node in tree(module).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def found(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the definition of a name at the top of a module, and the module in which it stands; follows imports."""
    for node in tree(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return module, node
    source, _, original = imported(module).get(name, "").rpartition(".")
    return found(source, original) if source.startswith("keras_nanguard") else None


def members(module: str, node: ast.ClassDef) -> Members:
    """Return methods by name, and attributes (their annotation, if they have one), of a class and of the classes that it derives from."""
    own: Members = {}
    for base in node.bases:
        known = _class(module, ast.unparse(base))
        own.update(members(*known) if known else {})
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            own.setdefault(part.attr, None)
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            own[part.name] = None if any(ast.unparse(d) == "property" for d in part.decorator_list) else part
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            own[part.target.id] = part.annotation
        elif isinstance(part, ast.Assign):
            own.update({t.id: None for t in part.targets if isinstance(t, ast.Name)})
    return own


def _class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return a class by the name that a module has for it: `Base` or `module.Base`."""
    owner, _, last = name.rpartition(".")
    where = imported(module).get(owner, "") if owner else module
    known = found(where, last) if where.startswith("keras_nanguard") else None
    return known if known is not None and isinstance(known[1], ast.ClassDef) else None  # type: ignore[return-value]


def declared(protocol: str) -> Members:
    """Return what a protocol declares."""
    known = _class(INTERFACE, protocol)
    assert known is not None, f"interface.py declares no {protocol}"
    return members(*known)


def mismatch(name: str, wanted: ast.AST | None, given: ast.AST | None, method: bool) -> str | None:
    """Say how a definition differs from its declaration; `None` where whoever goes by the declaration can use it."""
    if not isinstance(wanted, ast.FunctionDef):
        callable_ = wanted is not None and ast.unparse(wanted).startswith("Callable")
        return f"{name} is a function, not an attribute" if isinstance(given, ast.FunctionDef) and not callable_ else None
    if not isinstance(given, ast.FunctionDef):
        return f"{name} is an attribute, not a function"
    want, have = Parameters.of(wanted, True), Parameters.of(given, method)
    accepted = have.places[: len(want.places)]
    by_name = all(a == b or not a for a, b in zip(want.places, accepted))
    enough = len(accepted) == len(want.places) or have.takes_more
    rest = [place for place in have.places[len(want.places) :] if place not in have.optional and not want.takes_more]
    kept = want.optional <= have.optional
    fits = by_name and enough and not rest and kept and (have.takes_more or not want.takes_more)
    return None if fits else f"{name} takes {have}, declared is {want}"


def faults(protocol: str, given: Members, method: bool) -> list[str]:
    """Return what of a protocol is missing, and what differs."""
    wanted = declared(protocol)
    missing = [f"{name} is missing" for name in wanted if name not in given]
    return missing + [text for name in wanted if name in given and (text := mismatch(name, wanted[name], given[name], method))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("protocol", CLASSES)
def test_classes(protocol, backend):
    """A class has every method and attribute that its protocol declares, its own or a base's."""
    for place in CLASSES[protocol]:
        module, _, name = place.rpartition(".")
        known = _class(f"keras_nanguard._backends.{backend}.{module}", name)
        assert known is not None, place
        assert faults(protocol, members(*known), method=True) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["attach.ModelAttachment", "replay.Replay", "host.Host", "faults.Hook"])
def test_nothing_is_left_out(place, backend):
    """A class of a backend has its own version of every method that its base only declares."""
    module, _, name = place.rpartition(".")
    known = _class(f"keras_nanguard._backends.{backend}.{module}", name)
    assert known is not None
    assert [name for name, part in members(*known).items() if part is not None and "NotImplementedError" in ast.unparse(part)] == []


@pytest.mark.parametrize("protocol", ONLY)
def test_what_is_implemented_once(protocol):
    """The one class that implements a protocol does."""
    module, _, name = ONLY[protocol].rpartition(".")
    known = _class(module, name)
    assert known is not None
    assert faults(protocol, members(*known), method=True) == []


def test_every_protocol_is_held_to():
    """No protocol is declared and not looked at here."""
    protocols = {node.name for node in tree(INTERFACE).body if isinstance(node, ast.ClassDef)}
    assert protocols == {*CLASSES, *ONLY}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_names(backend):
    """What every backend has stands in a module of the same name."""
    names = {"attach", *(place.partition(".")[0] for places in CLASSES.values() for place in places), *SAME_NAMES}
    assert [name for name in sorted(names) if not exists(f"keras_nanguard._backends.{backend}.{name}")] == []


@functools.cache
def outside() -> dict[str, ast.Module]:
    """Return the modules of the library outside of `_backends`."""
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if "_backends" not in p.relative_to(PACKAGE).parts]
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in paths]
    return {name: ast.parse(p.read_text(encoding="utf-8")) for name, p in zip(names, paths)}


def test_nobody_names_a_backend():
    """The packages of the backends are imported by `current` alone, which picks one."""
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


def test_nobody_reaches_past_the_interface():
    """What belongs to a backend is asked for by its declared names alone: none is guessed, no method is asked whose it is."""
    guessed = []
    for module, syntax in outside().items():
        if module.endswith("_core.references"):  # reads functions of the user's
            continue
        for node in ast.walk(syntax):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "vars"):
                owner = ast.unparse(node.args[0]).rpartition(".")[2]
                name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
                guessed += [(module, ast.unparse(node))] if owner in HELD or name == "__self__" else []
            elif isinstance(node, ast.Attribute) and node.attr == "__self__":
                guessed.append((module, ast.unparse(node)))
    assert guessed == []


def test_nobody_asks_for_what_is_not_declared():
    """Every attribute that the rest of the library reads of a transaction is declared."""
    known = {"transaction": {*declared("Transaction")}}
    asked = set()
    for module, syntax in outside().items():
        for node in ast.walk(syntax):
            owner = ast.unparse(node.value).rpartition(".")[2] if isinstance(node, ast.Attribute) else ""
            if owner in known and node.attr not in known[owner]:
                asked.add((module, f"{owner}.{node.attr}"))
    assert asked == set()


def test_no_method_is_asked_whose_it_is():
    """Whose a method is, is asked in one place: of what stands on the instance of a model, whoever has put it there; and of a step of the user's."""
    modules = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}
    assert {module for module, text in modules.items() if "__self__" in text} == {"_backends.shared.attach", "_core.references"}
