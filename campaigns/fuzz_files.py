"""Writes recipes to files: a function from a tree of plain values to bytes for each container."""

from __future__ import annotations

import io
import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.lib import format as npy_format

from campaigns.fuzz_recipes import json_text, plain
from keras_nanguard._recording.database import APPLICATION, FORMAT, SCHEMA

__all__ = ["archive", "data_of", "hdf5", "journal", "npy", "npz", "read_hdf5", "read_npz", "read_sqlite", "sqlite"]

MAX_VALUES = 20_000
"""Maximum number of values of an array that are written; a shape may declare any number."""

ERRORS = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError, MemoryError, struct.error)
"""Exceptions of a writer for an invalid tree; that part is omitted."""


def _number(value: Any, default: int = 0) -> int:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 1 << 64 else default


def data_of(node: Any, size: int) -> bytes:
    """Return this many bytes: a pattern, one repeated byte, or hexadecimal digits."""
    if isinstance(node, dict) and "fill" in node:
        count = min(max(_number(node.get("n"), size), 0), 8 << 20)
        return bytes([_number(node["fill"]) & 255]) * count
    if isinstance(node, str):
        try:
            return bytes.fromhex(node)
        except ValueError:
            return node.encode("utf-8", "surrogatepass")
    return b"\0" * min(size, 8 * MAX_VALUES)


# NumPy


def npy(member: Mapping[str, Any]) -> bytes:
    """Return a `.npy` member: `descr`, `fortran`, `shape` and `body`, or a custom `header`, in a
    `version`.
    """
    descr, shape = member.get("descr", "<f4"), member.get("shape", [])
    dimensions = tuple(plain(shape)) if isinstance(shape, list) else plain(shape)
    header = member.get("header")
    if not isinstance(header, str):
        try:
            header = f"{{'descr': {plain(descr)!r}, 'fortran_order': {plain(member.get('fortran', False))!r}, 'shape': {dimensions!r}, }}"
        except (ValueError, RecursionError):
            header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}"
    text = header.encode("utf-8", "surrogatepass")
    version = member.get("version")
    major = _number(version, 1) & 255
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    size = struct.pack("<H", min(len(text), 65535)) if major == 1 else struct.pack("<I", len(text))
    return b"\x93NUMPY" + bytes([major, 0]) + size + text + data_of(member.get("body"), 4)


def npz(members: Any) -> bytes:
    """Return an archive of `.npy` members."""
    made = []
    for number, member in enumerate(members if isinstance(members, list) else []):
        if isinstance(member, dict):
            made.append({**member, "name": member.get("name", f"{number}.npy"), "data": npy(member)})
    return archive(made)


# Archives


def archive(members: Any) -> bytes:
    """Return a zip archive; the directory may have wrong `size`, `packed`, `offset`, `flags` and
    `method` of a member.
    """
    body, directory, count = bytearray(), bytearray(), 0
    for member in members if isinstance(members, list) else []:
        if not isinstance(member, dict):
            continue
        count += 1
        name = str(plain(member.get("name", "a"))).encode("utf-8", "surrogatepass")[:60_000]
        data = member.get("data", b"")
        data = data if isinstance(data, bytes) else data_of(data, 0)
        method = 8 if member.get("deflated") else 0
        stored = zlib.compress(data, 6)[2:-4] if method else data
        lie = member["lie"] if isinstance(member.get("lie"), dict) else {}
        size, packed = _number(lie.get("size"), len(data)) & 0xFFFFFFFF, _number(lie.get("packed"), len(stored)) & 0xFFFFFFFF
        flags, method = _number(lie.get("flags")) & 0xFFFF, _number(lie.get("method"), method) & 0xFFFF
        fields = struct.pack("<HHHHHIIIHH", 20, flags, method, 0, 33, zlib.crc32(data), packed, size, len(name), 0)
        offset = _number(lie.get("offset"), len(body)) & 0xFFFFFFFF
        body += b"PK\x03\x04" + fields + name + stored
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, offset) + name
    end = struct.pack("<HHHHIIH", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), len(body), 0)
    return bytes(body + directory + b"PK\x05\x06" + end)


# HDF5


def hdf5(tree: Any) -> bytes:
    """Return an HDF5 file: `attrs` of the file, and `nodes` with `path`, `kind`, `attrs` and the
    fields of its kind.
    """
    buffer = io.BytesIO()
    tree = tree if isinstance(tree, dict) else {"nodes": tree if isinstance(tree, list) else []}
    with h5py.File(buffer, "w") as file:
        _attributes(file, tree.get("attrs"))
        for node in tree.get("nodes") if isinstance(tree.get("nodes"), list) else []:
            if isinstance(node, dict):
                try:
                    _node(file, node)
                except ERRORS:
                    continue
    return buffer.getvalue()


def _node(file: h5py.File, node: Mapping[str, Any]) -> None:
    path, kind = str(plain(node.get("path", "x")))[:2000], node.get("kind", "dataset")
    target = str(plain(node.get("target", "/")))
    if kind == "group":
        made: Any = file.require_group(path)
    elif kind == "soft":
        file[path] = h5py.SoftLink(target)
        return
    elif kind == "external":
        file[path] = h5py.ExternalLink(str(plain(node.get("file", "../../outside/secret.h5"))), target)
        return
    elif kind == "hard":
        file[path] = file[target]
        return
    elif kind == "type":
        file[path] = np.dtype(str(node.get("dtype", "f4")))
        return
    else:
        made = _dataset(file, path, kind, node)
    _attributes(made, node.get("attrs"))


def _dataset(file: h5py.File, path: str, kind: Any, node: Mapping[str, Any]) -> Any:
    given = node.get("shape", [2])
    shape = tuple(min(max(_number(n), 0), 1 << 60) for n in given) if isinstance(given, list) else ()
    name = plain(node.get("dtype", "f4"))
    dtype = h5py.string_dtype() if name == "text" else h5py.vlen_dtype(np.dtype("f4")) if name == "vlen" else np.dtype(name)
    if kind == "virtual":
        layout = h5py.VirtualLayout(shape, dtype)
        layout[...] = h5py.VirtualSource(str(plain(node.get("file", "../../outside/secret.h5"))), str(node.get("target", "secret")), shape)
        return file.create_virtual_dataset(path, layout)
    if kind == "stored":
        size = math.prod(shape) * dtype.itemsize
        return file.create_dataset(path, shape, dtype, external=[("../../outside/secret.txt", 0, size)])  # and never another file
    options: dict[str, Any] = {}
    if isinstance(node.get("chunks"), list):
        options["chunks"] = tuple(max(_number(n, 1), 1) for n in node["chunks"])
        if node.get("packed") in ("gzip", "lzf"):
            options["compression"] = node["packed"]
        for flag in ("shuffle", "fletcher32"):
            if node.get(flag):
                options[flag] = True
    if "fill" in node and dtype.kind in "fiu":
        options["fillvalue"] = node["fill"]
    made = file.create_dataset(path, shape, dtype, **options)
    if "data" in node and math.prod(shape) <= MAX_VALUES:
        values = np.resize(np.asarray(plain(node["data"])).reshape(-1)[:MAX_VALUES], shape)
        made[...] = values.astype(dtype) if dtype.kind != "O" else values.astype(str).astype(object)
    return made


def _attributes(node: Any, given: Any) -> None:
    for name, value in given.items() if isinstance(given, dict) else ():
        value = plain(value)
        try:
            node.attrs[str(name)] = (
                np.void(value) if isinstance(value, bytes) and value else json.dumps(value) if isinstance(value, dict) else value
            )
        except ERRORS:
            continue


# SQLite


def sqlite(tree: Any) -> bytes:
    """Return a recording: `application`, `version`, `tables` with their rows, and further `statements`."""
    tree = tree if isinstance(tree, dict) else {}
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.execute(f"PRAGMA application_id = {_number(tree.get('application'), APPLICATION) & 0x7FFFFFFF}")
        connection.execute(f"PRAGMA user_version = {_number(tree.get('version'), FORMAT) & 0x7FFFFFFF}")
        if isinstance(tree.get("encoding"), str):
            _run(connection, f"PRAGMA encoding = '{tree['encoding']}'")
        left_out = tree.get("left_out") if isinstance(tree.get("left_out"), list) else []
        for name, statement in SCHEMA.items():
            if name not in left_out:
                connection.execute(statement)
        tables = tree.get("tables") if isinstance(tree.get("tables"), dict) else {}
        for name, rows in tables.items():
            for row in rows if isinstance(rows, list) else []:
                if isinstance(row, list) and row and name in SCHEMA:
                    _run(connection, f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", [_cell(cell) for cell in row])
        for statement in tree.get("statements") if isinstance(tree.get("statements"), list) else []:
            if isinstance(statement, str) and "attach" not in statement.lower() and "recursive" not in statement.lower():
                _run(connection, statement)
        return connection.serialize()
    finally:
        connection.close()


def journal(name: bytes, size: int) -> bytes:
    """Return a journal for a recording of this size in bytes; it names another file as the
    super-journal of its transaction.
    """
    magic = bytes.fromhex("d9d505f920a163d7")
    head = (magic + struct.pack(">5I", 0, 0, size // 4096, 512, 4096)).ljust(512, b"\0")
    total = sum(byte if byte < 128 else byte - 256 for byte in name) & 0xFFFFFFFF
    return head + struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">2I", len(name), total) + magic


def _run(connection: sqlite3.Connection, statement: str, values: Any = ()) -> None:
    try:
        connection.execute(statement, values)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, UnicodeEncodeError):
        return


def _cell(node: Any) -> Any:
    """Return a value for SQLite: a table or list, and `{"json": ...}`, as JSON text."""
    if isinstance(node, dict) and set(node) == {"json"}:
        return json_text(node["json"])
    value = plain(node)
    if isinstance(value, (dict, list)):
        return json_text(node)
    return (
        value
        if not isinstance(value, int) or -(1 << 63) <= value < 1 << 63
        else float(value)
        if abs(value) < 1 << 1000
        else str(value)[:4000]
    )


# Reading of files of the library, for the first recipes


def read_npz(path: Path) -> list[dict[str, Any]]:
    """Return the tree of an `.npz` file."""
    with np.load(path, allow_pickle=False) as arrays:
        return [
            {"name": f"{name}.npy", "descr": npy_format.dtype_to_descr(a.dtype), "shape": list(a.shape), "body": a.tobytes().hex()}
            for name, a in arrays.items()
        ]


def read_hdf5(path: Path) -> dict[str, Any]:
    """Return the tree of an HDF5 file of a few small arrays."""
    nodes: list[dict[str, Any]] = []

    def visit(name: str, node: Any) -> None:
        attributes = {key: value if isinstance(value, str) else str(value) for key, value in node.attrs.items()}
        if isinstance(node, h5py.Dataset):
            values = np.asarray(node[()])
            shape, data = list(values.shape), values.reshape(-1).tolist()
            nodes.append({"path": name, "shape": shape, "dtype": values.dtype.str, "data": data, "attrs": attributes})
        else:
            nodes.append({"path": name, "kind": "group", "attrs": attributes})

    with h5py.File(path) as file:
        file.visititems(visit)
        return {"attrs": {key: str(value) for key, value in file.attrs.items()}, "nodes": nodes}


def read_sqlite(path: Path) -> dict[str, Any]:
    """Return the tree of a recording; JSON in it is also a tree."""
    connection = sqlite3.connect(path)
    try:
        tables = {name: [[_tree(cell) for cell in row] for row in connection.execute(f"SELECT * FROM {name}")] for name in SCHEMA}
    finally:
        connection.close()
    return {"tables": tables, "statements": []}


def _tree(cell: Any) -> Any:
    if isinstance(cell, str):
        try:
            return {"json": json.loads(cell)}
        except ValueError:
            return cell
    return cell
