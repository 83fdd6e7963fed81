"""Imports go strictly down; one package uses Keras internals, and one each backend."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "keras_nanguard"

ORDER = (
    ("_version",),
    ("_core",),
    ("_recording",),
    ("_policy",),
    ("_keras",),
    ("_backends",),
    ("_files",),
    ("_diagnose",),
    ("_lint",),
    ("_report",),
    ("_fit",),
    ("errors", "actions", "guard", "model", "testing"),
    ("_cli",),
    ("__main__",),
)
"""The packages from bottom to top: each may import only earlier ones."""

BACKENDS = ("tensorflow", "jax", "torch")
WITHIN_BACKENDS = (("interface", "current"), ("processes",), ("shared",), BACKENDS)
"""The same within `_backends`. The packages of two backends do not import each other."""

KNOW_NO_KERAS = ("_version", "_core", "_recording", "_policy", "_report", "errors", "actions")
"""Modules that can be loaded and used without Keras and a backend."""

NOT_OF_KERAS = {
    *("_getframe", "_current_frames", "_exit", "_SubParsersAction", "_actions"),  # Python
    *("_id", "_rng", "_autograph", "_jit_compile", "_handle_data", "_functions"),  # TensorFlow
    "_trace",  # JAX
    *("_flatten_dense_tensors", "_foreach_copy_", "_utils", "_current_graph_task_id"),  # PyTorch
    *("_cdata", "_nnz", "_schema", "_version", "_foreach_norm", "_opt_called", "_per_optimizer_states", "_buffers", "_torchdynamo_orig_callable"),  # PyTorch
    *("_get_default_store", "_get_total_norm", "_local_tensor", "_to_kwargs"),  # PyTorch
    "_src",  # JAX
    *("_fields", "_asdict", "_replace", "_lock"),  # our own
    "_initializer",  # the end of a key of a config
}


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module by its name within the package: `_fit.session`; `""` is the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return the full names of all imports of a module, at load or within a function."""
    found = set()
    name = f"keras_nanguard.{module}".rstrip(".")
    package = name if modules()[module].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{source}.{alias.name}" if _is_ours(f"{source}.{alias.name}") else source for alias in node.names}
    return frozenset(found)


def _is_ours(name: str) -> bool:
    return name.startswith("keras_nanguard.") and name.removeprefix("keras_nanguard.") in modules()


def edges(module: str) -> set[str]:
    return {name.removeprefix("keras_nanguard.") for name in imports(module) if _is_ours(name)} - {module}


def rank(name: str, order: tuple[tuple[str, ...], ...]) -> int:
    return next(place for place, names in enumerate(order) if name in names)


def test_every_module_has_its_place():
    """Exactly the packages and backends of the order exist."""
    tops = {module.partition(".")[0] for module in modules()} - {""}
    assert tops == {name for names in ORDER for name in names}
    inside = {module.split(".")[1] for module in modules() if module.startswith("_backends.")}
    assert inside == {name for names in WITHIN_BACKENDS for name in names}


@pytest.mark.parametrize("module", sorted(set(modules()) - {""}))
def test_imports_go_down(module):
    """Also lazy imports; only the package itself imports names of later modules."""
    own = rank(module.partition(".")[0], ORDER)
    assert [other for other in edges(module) if other and rank(other.partition(".")[0], ORDER) > own] == []
    assert "" not in edges(module), "nothing inside imports the package itself"
    if module.startswith("_backends."):
        room = module.split(".")[1]
        others = [other.split(".")[1] for other in edges(module) if other.startswith("_backends.")]
        above = [other for other in others if rank(other, WITHIN_BACKENDS) > rank(room, WITHIN_BACKENDS)]
        beside = [other for other in others if other in BACKENDS and other != room]
        assert above + beside == []


def _listed(line: str) -> list[str]:
    """Return the modules that a line of a package's docstring lists: in the first cell of a table, or in an outline."""
    if line.startswith("| `"):
        return re.findall(r"`(\w+)`", line.split("|")[1])
    outline = re.sub(r"\s*\(.*?\)|:.*", "", re.split(r"\s{2,}", line)[-1]) if line.startswith("    ") else ""
    return [name for name in re.split(r",\s*", outline.strip()) if name]


@pytest.mark.parametrize("package", [m for m, path in modules().items() if m and path.name == "__init__.py"])
def test_modules_in_the_docstring_of_a_package_exist(package):
    listed = {name for line in ast.get_docstring(tree(package)).splitlines() for name in _listed(line)}
    inside = {module.removeprefix(f"{package}.") for module in modules() if module.startswith(f"{package}.")}
    assert listed - inside == set()
    assert package != "_fit" or listed == inside


def test_no_circles():
    """No module imports a module that imports it, directly or indirectly, lazily or not."""
    done: set[str] = set()
    circles: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(edges(module)):
                visit(other, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())
    assert circles == []


def test_loads_no_backend():
    """Loading the package, or any module that needs no Keras, loads neither Keras nor a backend."""
    names = [f"keras_nanguard.{m}".rstrip(".") for m in modules() if m.partition(".")[0] in ("", *KNOW_NO_KERAS)]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print([m for m in ('keras', 'tensorflow', 'jax', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_stay_at_home(backend):
    """A backend is imported in its own package, and in `_keras` for what only it has."""
    at_home = (f"_backends.{backend}.", "_keras.")
    found = [m for m in modules() if any(name.partition(".")[0] == backend for name in imports(m))]
    assert [m for m in found if not m.startswith(at_home)] == []


def test_one_module_selects_the_backend():
    asking = [m for m in modules() for n in ast.walk(tree(m)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "keras.backend.backend"]
    assert asking == ["_backends.current"]


def test_only_current_imports_backends():
    """Only `_backends.current`, which selects one, leads from the rest of the package to a backend."""
    packages = tuple(f"_backends.{backend}" for backend in BACKENDS)
    assert [(m, other) for m in modules() if not m.startswith("_backends.") for other in edges(m) if other.startswith(packages)] == []


def _uses_keras_src(module: str) -> bool:
    spelled = (n for n in ast.walk(tree(module)) if isinstance(n, ast.Attribute) and n.attr == "src")
    return any(name.startswith("keras.src") for name in imports(module)) or any(
        isinstance(n.value, ast.Name) and n.value.id == "keras" for n in spelled
    )


def test_keras_src():
    """`keras.src` is used only in the package for Keras internals."""
    assert [m for m in modules() if _uses_keras_src(m) and not m.startswith("_keras.")] == []


@functools.cache
def of_keras() -> frozenset[str]:
    """Return the names with one leading underscore of variables, tensors, layers, losses and optimizers."""
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    several = (layer, layer.kernel, keras.Input((1,)), keras.losses.MeanSquaredError(), keras.optimizers.Adam(), keras.Sequential())
    return frozenset(name for one in several for name in dir(one) if re.match("_[a-z]", name))


def _private(module: str) -> set[str]:
    """Return the names with one leading underscore that are read from objects of others."""
    names = set()
    aliases = {name.rpartition(".")[2] for name in edges(module)}
    defined = {n.name for n in ast.walk(tree(module)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls", *aliases}:
                names.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and node.args[1:]:
            names.add(getattr(node.args[1], "value", ""))
    # Names in strings, such as those of overrides, if an object of Keras has them.
    strings = {n.value for n in ast.walk(tree(module)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    names |= strings & of_keras()
    single = {n for n in names if isinstance(n, str) and re.match(r"_[a-z]", n)}
    return single - defined - NOT_OF_KERAS


def test_names_private_to_keras():
    """Only the package for Keras internals uses private Keras names."""
    found = {module: sorted(names) for module in modules() if not module.startswith("_keras.") and (names := _private(module))}
    assert found == {}, found
