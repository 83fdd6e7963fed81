"""`WRONG`: by name functions that write a file with one structural error to a folder."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib

import h5py
import numpy as np

KERNEL = "layers/dense/vars/0"


def hdf5(fill, name="wrong.weights.h5"):
    """Return a function that writes one HDF5 file."""

    def write(folder):
        with h5py.File(folder / name, "w") as file:
            fill(file)
        return folder / name

    return write


def kernel(value):
    """Return a function that fills a file with this kernel."""

    def fill(file):
        file[KERNEL] = value

    return fill


def filled(shape, **options):
    """Return a function that fills a file with a kernel of NaN without any stored byte."""

    def fill(file):
        file.create_dataset(KERNEL, shape, "f4", fillvalue=np.nan, **options)

    return fill


def _attributes(file):
    group = file.create_group("layers/dense/vars")
    group.attrs["name"] = np.arange(3)
    group.attrs["dtype"] = h5py.Empty("f4")
    group["0"] = np.full((2, 2), np.nan)
    group["0"].attrs["dtype"] = "bfloat16"
    file.attrs["model_config"] = np.frombuffer(b"\xff" * 64, np.uint8)


def keras(config, weights=None):
    """Return a function that writes a `.keras` file."""

    def write(folder):
        inner = hdf5(weights or kernel(np.full((2, 2), np.nan)), "inner.h5")(folder)
        with zipfile.ZipFile(folder / "wrong.keras", "w") as archive:
            archive.writestr("config.json", config, zipfile.ZIP_DEFLATED)
            archive.write(inner, "model.weights.h5")
        inner.unlink()
        return folder / "wrong.keras"

    return write


def configured(**dense):
    """Return the configuration of a model with one Dense layer, as bytes."""
    layer = {"class_name": "Dense", "config": {"name": "dense", **dense}}
    return json.dumps({"class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}).encode()


def npy(shape, body=b""):
    """Return a `.npy` member of float32 that declares this shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


def shape_beyond_the_bytes(folder):
    with zipfile.ZipFile(folder / "wrong.npz", "w") as archive:
        archive.writestr("layer/0.npy", npy((1 << 40,), bytes(8)))
    return folder / "wrong.npz"


def index_that_lists_itself(folder):
    (folder / "wrong.weights.json").write_text(json.dumps({"weight_map": {"/layers/dense/vars": ["wrong.weights.json"] * 3}}))
    return folder / "wrong.weights.json"


def archive_that_unpacks_to_much(folder):
    packer, data = zlib.compressobj(9, zlib.DEFLATED, -15), io.BytesIO()
    header, block, crc, size = npy((5 << 23,)), bytes(1 << 20), 0, 0
    for part in [header, *[block] * 160]:
        crc, size = zlib.crc32(part, crc), size + len(part)
        data.write(packer.compress(part))
    data.write(packer.flush())
    packed = data.getvalue()
    fields = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, crc, len(packed), size, 7, 0)
    entry = b"PK\x01\x02" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, 0) + b"0/k.npy"
    local = b"PK\x03\x04" + fields + b"0/k.npy" + packed
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(local), 0)
    (folder / "wrong.npz").write_bytes(local + entry + end)
    return folder / "wrong.npz"


WRONG = {
    "kernel is a group": hdf5(lambda file: file.create_group(KERNEL)),
    "two gigabytes of fill value": hdf5(filled((1 << 29,))),
    "one chunk of a gigabyte": hdf5(filled((1 << 28,), chunks=(1 << 28,), compression="gzip")),
    "attributes of other kinds": hdf5(_attributes),
    "records": hdf5(kernel(np.zeros(3, [("a", "f4"), ("b", "i2")]))),
    "configuration is nested": keras(b"[" * 200_000),
    "configuration of lists": keras(b"[" + b"[]," * (1 << 26) + b"[]]"),
    "initializer beyond float": keras(configured(kernel_initializer={"class_name": "Constant", "config": {"value": 10**400}})),
    "layer of fill value": keras(configured(), filled((1 << 28,))),
    "shape beyond the bytes": shape_beyond_the_bytes,
    "index that lists itself": index_that_lists_itself,
    "archive that unpacks to much": archive_that_unpacks_to_much,
}
