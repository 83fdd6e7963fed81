"""Recipes: an untrusted file as a tree of plain values that can be mutated and written to a file.

A recipe is `{"tree": ..., "patch": [...]}`: the tree has the content of the file, and the patch
then changes bytes of it. Some nodes represent content that a tree cannot hold: `{"!": "deep", "n":
900}` for lists in lists, `{"!": "long", "text": "ab", "n": 99}` for a long text, `{"!": "raw",
"text": "1e999"}` for a text that is written unchanged, `{"!": "bytes", "hex": "00ff"}` for bytes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

__all__ = ["crossed", "json_text", "mutated", "packed", "patched", "plain", "toml_text", "unpacked", "words_of", "yaml_text"]

Recipe = dict[str, Any]

NUMBERS = (
    *(0, -0.0, -1, 1, 2, 0.5, 127, 255, 256, 65535, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63),
    *(-(1 << 63), 1 << 64, 10**18, 10**30, 10**400, 1e-320, 1e308, -1e308, 3.4e38, 65504.0, 1e16),
)
TEXTS = (
    *(
        "",
        "\x00",
        "a\x00b",
        "\x1b[31mred\x1b[0m",
        "\x1b]8;;http://a.b\x07link\x1b]8;;\x07",
        "\x1b]0;title\x07",
        "\u202eabc",
        "\ud800",
        "\ufeff",
    ),
    *("\r\n", "line\nbreak", "\u2028", "\x7f", "\x9b31m", "[bold red]x[/]", "[/]", "[link=file:///etc/passwd]x[/link]", "😀" * 40),
    *("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "' onmouseover='alert(1)"),
    *(
        "javascript:alert(1)",
        "{{ 7 * 7 }}",
        "{% include '/etc/passwd' %}",
        "<!--",
        "]]>",
        "<![CDATA[",
        "&lt;",
        "&#0;",
        "{name}",
        "%s%n",
        "$x$",
    ),
    *(
        "../../outside/secret.h5",
        "/etc/passwd",
        "../../outside/secret.npz",
        "..",
        ".",
        "/",
        "C:\\x",
        "file:///etc/passwd",
        "~/x",
        "a" * 300,
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "NaN",
        "Infinity",
        "1e999",
        "0x10",
        "1_0",
        " 1 ",
        "true",
        "null",
        "~",
        "*",
        "**",
        "[!a]*",
        "*a*a*a*a*a*b",
        "[" * 50,
    ),
    *("__class__", "__import__('os').system('x')", "os", "system", "builtins", "eval", "!!python/object/apply:os.system", "&a", "*a", "<<"),
    *(
        "; DROP TABLE steps; --",
        "ATTACH DATABASE '../../outside/x.sqlite' AS x",
        "float32",
        "bfloat16",
        "float8_e4m3fn",
        "object",
        "|O",
        "|V0",
    ),
)
RAWS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "0x" + "f" * 5000,
    "1" * 5000,
    "1979-05-27T07:32:00Z",
    "1e-999",
    "inf",
    "'a",
    '"',
    "#",
    "&a [*a]",
)


def words_of(node: Any) -> Iterator[str]:
    """Yield every key and every text of a tree."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from words_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from words_of(value)
    elif isinstance(node, str):
        yield node


# Mutation


def mutated(recipe: Recipe, random: Random, words: list[str], raw: bool) -> Recipe:
    """Return a recipe with a few changes.

    Args:
        recipe: the recipe, which does not change.
        random: the random generator.
        words: keys and texts that this kind of file knows.
        raw: whether the file is a text, into which a node can be written unchanged.
    """
    recipe = copy.deepcopy(recipe)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        if random.random() < 0.15:
            _patch(recipe, random)
        else:
            _change(recipe, random, words, raw)
    return recipe


def crossed(one: Recipe, other: Recipe, random: Random) -> Recipe:
    """Return the first recipe with a node of the second inserted."""
    one = copy.deepcopy(one)
    places, donors = _places(one["tree"]), _places(other["tree"])
    if places and donors:
        (inside, key), (outside, name) = random.choice(places), random.choice(donors)
        inside[key] = copy.deepcopy(outside[name])
    return one


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Return every place below a node, as a container and its key."""
    found: list[tuple[Any, Any]] = []
    stack = [node]
    while stack:
        inner = stack.pop()
        pairs = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        for key, value in pairs:
            found.append((inner, key))
            stack.append(value)
    return found


def _patch(recipe: Recipe, random: Random) -> None:
    patches = recipe.setdefault("patch", [])
    if patches and random.random() < 0.3:
        patches.pop(random.randrange(len(patches)))
        return
    kind = random.choice(("set", "set", "set", "insert", "delete", "copy", "cut"))
    length = random.choice((1, 1, 2, 4, 8, 64))
    data = random.choice(
        (random.randbytes(length), b"\xff" * length, b"\0" * length, random.choice(TEXTS).encode("utf-8", "surrogatepass"))
    )
    patches.append([kind, round(random.random() ** random.choice((1, 3)), 5), data[:64].hex() if kind in ("set", "insert") else length])
    del patches[8:]


def _change(recipe: Recipe, random: Random, words: list[str], raw: bool) -> None:
    places = _places(recipe["tree"])
    if not places:
        recipe["tree"] = {random.choice(words or ["a"]): _value(random, words, raw)}
        return
    container, key = random.choice(places)
    old = container[key]
    what = random.randrange(10)
    if what < 4:
        container[key] = _value(random, words, raw)
    elif what == 4:
        container[key] = copy.deepcopy(old if (other := random.choice(places)) is None else other[0][other[1]])
    elif what == 5:
        del container[key]
    elif what == 6 and isinstance(container, list):
        container[key:key] = [copy.deepcopy(old)] * random.choice((1, 1, 2, 9, 60))
    elif what == 6:
        container[random.choice(words or ["a"])] = container.pop(key) if random.random() < 0.5 else copy.deepcopy(old)
    elif what == 7:
        container[key] = _tweaked(old, random)
    elif what == 8:
        container[key] = random.choice(([old], {random.choice(words or ["a"]): old}, [], {}, [[]], None, [old, old]))
    elif isinstance(old, dict):
        old[random.choice(words or ["a"])] = _value(random, words, raw)
    elif isinstance(old, list):
        old.append(_value(random, words, raw))
    else:
        container[key] = _tweaked(old, random)


def _value(random: Random, words: list[str], raw: bool) -> Any:
    kind = random.randrange(12)
    if kind < 3:
        return random.choice(NUMBERS)
    if kind < 6:
        return random.choice(TEXTS)
    if kind < 8 and words:
        return random.choice(words)
    if kind == 8:
        return random.choice((None, True, False, [], {}, [None], {"": None}))
    if kind == 9:
        return {"!": "deep", "n": random.choice((2, 30, 130, 500, 990, 3000, 50_000))}
    if kind == 10:
        return {
            "!": "long",
            "text": random.choice(("a", "0", "[],", "a.", " ", "\n", random.choice(TEXTS))),
            "n": random.choice((10, 500, 20_000)),
        }
    return {"!": "raw", "text": random.choice(RAWS)} if raw else {"!": "bytes", "hex": random.randbytes(random.choice((0, 1, 8))).hex()}


def _tweaked(old: Any, random: Random) -> Any:
    if isinstance(old, bool) or old is None:
        return random.choice((True, False, None, 0, "true"))
    if isinstance(old, (int, float)):
        small = abs(old) < 1e300
        return random.choice((old + 1, old - 1, -old, old * 2, old / 3 if small else old, old * 10**9, repr(old) if small else "1", 0))
    if isinstance(old, str):
        at = random.randrange(len(old) + 1)
        return random.choice((old[:at], old[at:], old * 2, old[:at] + random.choice(TEXTS) + old[at:], old.upper(), old + " ", old[::-1]))
    return old


# Writing


def plain(node: Any) -> Any:
    """Return the values that a tree represents, without `raw` nodes."""
    if isinstance(node, dict) and "!" in node:
        kind = node["!"]
        if kind == "deep":
            made: Any = []
            for _ in range(_count(node, 900)):
                made = [made]
            return made
        if kind == "long":
            return (str(node.get("text", "a")) or "a") * _count(node, 20_000)
        if kind == "bytes":
            return _bytes(node)
        return str(node.get("text", ""))
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list) else node


def _count(node: dict[str, Any], most: int) -> int:
    number = node.get("n", 1)
    return max(0, min(int(number), most)) if isinstance(number, (int, float)) and abs(number) < 1e15 else 1


def _bytes(node: dict[str, Any]) -> bytes:
    try:
        return bytes.fromhex(str(node.get("hex", "")))
    except ValueError:
        return b""


def _text(node: Any, scalar: Callable[[Any], str], pair: str, separators: tuple[str, str]) -> str:
    """Return a tree as text, including its special nodes."""
    if isinstance(node, dict) and "!" in node:
        if node["!"] == "deep":
            depth = _count(node, 50_000)
            return "[" * depth + "]" * depth
        if node["!"] == "raw":
            return str(node.get("text", ""))
        return scalar(plain(node))
    if isinstance(node, dict):
        return "{" + separators[0].join(f"{scalar(k)}{pair}{_text(v, scalar, pair, separators)}" for k, v in node.items()) + "}"
    if isinstance(node, list):
        return "[" + separators[1].join(_text(item, scalar, pair, separators) for item in node) + "]"
    return scalar(node)


def _json_scalar(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**4000:
        return hex(value)
    return json.dumps(value)


def json_text(node: Any) -> str:
    """Return a tree as JSON, which `raw` nodes may make invalid."""
    return _text(node, _json_scalar, ": ", (", ", ", "))


def yaml_text(node: Any) -> str:
    """Return a tree as YAML: its first level in blocks, the rest in flow style."""
    if not isinstance(node, dict) or "!" in node:
        return json_text(node)
    return "".join(f"{_json_scalar(key)}: {json_text(value)}\n" for key, value in node.items())


def toml_text(node: Any) -> str:
    """Return a tree as TOML: tables and lists of tables with headers, the rest inline."""
    if not isinstance(node, dict) or "!" in node:
        return _toml(node)
    lines, tables = [], []
    for key, value in node.items():
        rows = value if isinstance(value, list) and value and all(isinstance(row, dict) and "!" not in row for row in value) else None
        if rows is not None:
            tables += [line for row in rows for line in (f"[[{_toml_key(key)}]]", *_toml_lines(row))]
        elif isinstance(value, dict) and "!" not in value:
            tables += [f"[{_toml_key(key)}]", *_toml_lines(value)]
        else:
            lines.append(f"{_toml_key(key)} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _toml_lines(table: dict[str, Any]) -> Iterable[str]:
    return (f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items())


def _toml_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_.") for c in key) else json.dumps(key)


def _toml(node: Any) -> str:
    def scalar(value: Any) -> str:
        return "''" if value is None else _json_scalar(value)

    return _text(node, scalar, " = ", (", ", ", "))


def patched(data: bytes, patches: Any) -> bytes:
    """Return the bytes of a file after the patch of its recipe."""
    found = bytearray(data)
    for patch in patches if isinstance(patches, list) else ():
        kind, share, content = patch
        at = min(int(share * (len(found) + 1)), len(found))
        if kind in ("set", "insert"):
            new = bytes.fromhex(content)
            found[at : at + (len(new) if kind == "set" else 0)] = new
        elif kind == "delete":
            del found[at : at + content]
        elif kind == "copy":
            found[at:at] = found[at : at + content]
        elif kind == "cut":
            del found[max(at, 1) :]
    return bytes(found)


def packed(recipe: Recipe) -> bytes:
    """Return a recipe as bytes."""
    return json.dumps(recipe, separators=(",", ":")).encode("ascii")


def unpacked(data: bytes) -> Recipe | None:
    """Return the recipe in bytes, `None` if they are not a recipe."""
    try:
        recipe = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return recipe if isinstance(recipe, dict) and "tree" in recipe else None
