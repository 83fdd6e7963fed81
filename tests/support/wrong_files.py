"""`WRONG`: by name functions that write a file with one structural error to a folder."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib

import h5py
import numpy as np

WRONG = {}

KERNEL = "layers/dense/vars/0"


def wrong(function):
    """Add a function to the table."""
    WRONG[function.__name__] = function
    return function


def hdf5(fill, name="wrong.weights.h5", **options):
    """Return a function that writes one HDF5 file."""

    def write(folder):
        with h5py.File(folder / name, "w", **options) as file:
            fill(file)
        return folder / name

    return write


def layers(**variables):
    """Return a function that fills a file with one layer of these variables."""

    def fill(file):
        for place, value in variables.items():
            file[f"layers/dense/vars/{place.lstrip('v')}"] = value

    return fill


def filled(shape, **options):
    """Return a function that fills a file with a kernel of NaN without any stored byte."""

    def fill(file):
        file.create_dataset(KERNEL, shape, "f4", fillvalue=np.nan, **options)

    return fill


def _as_dataset(file):
    file["model_weights"] = np.full(3, np.nan)


def _nameless(file):
    file.create_group("model_weights").attrs["weight_names"] = [b"a", b"b", b"c"]
    file.attrs["layer_names"] = [b"one", b"two"]
    file["model_weights/one"] = np.full(3, np.nan)


def _many_fills(file):
    for number in range(20):
        file.create_dataset(f"layers/dense_{number}/vars/0", (1 << 25,), "f4", fillvalue=np.nan)


def _zeros(file):
    kernel = file.create_dataset(KERNEL, (1 << 27,), "f4", chunks=(1 << 24,), compression="gzip")
    kernel[:4] = np.nan


def _columns(file):
    kernel = file.create_dataset(KERNEL, (1 << 15, 1 << 12), "f4", chunks=(1 << 15, 64), compression="gzip")
    kernel[:4, :4] = np.nan


def _long_names(file):
    for end in ("one", "two", "three"):
        file["layers/" + "x" * 400 + end + "/vars/0"] = np.full(3, np.nan)


def _slots(file):
    file["optimizer/vars/0"], file["optimizer/vars/1"] = np.int64(3), np.float32(0.1)
    for number in range(2, 12):
        file.create_dataset(f"optimizer/vars/{number}", (1 << 25,), "f4", fillvalue=np.nan)
    file["layers/dense/vars/0"] = np.ones((2, 2), "f4")


def _heap(file):
    text = h5py.string_dtype()
    file.create_dataset("text", (1 << 20,), text, chunks=(1 << 20,), compression="gzip")
    file["layers/dense/vars"] = np.full(3, np.nan)


def _attributes(file):
    group = file.create_group("layers/dense/vars")
    group.attrs["name"] = np.arange(3)
    group.attrs["dtype"] = h5py.Empty("f4")
    group["0"] = np.full((2, 2), np.nan)
    group["0"].attrs["dtype"] = "bfloat16"
    file.attrs["model_config"] = np.frombuffer(b"\xff" * 64, np.uint8)


WRONG |= {
    "kernel is a group": hdf5(lambda file: file.create_group(KERNEL)),
    "model_weights is an array": hdf5(_as_dataset, "wrong.h5"),
    "fewer layers than names": hdf5(_nameless, "wrong.h5"),
    "two gigabytes of fill value": hdf5(filled((1 << 29,))),
    "many fill values": hdf5(_many_fills),
    "two gigabytes of fill value in chunks": hdf5(filled((1 << 29,), chunks=(1 << 20,), compression="gzip")),
    "a chunk for each value": hdf5(filled((1 << 28,), chunks=(1,))),
    "one chunk of a gigabyte": hdf5(filled((1 << 28,), chunks=(1 << 28,), compression="gzip")),
    "half a gigabyte of zeros": hdf5(_zeros),
    "chunks across the rows": hdf5(_columns),
    "slots of fill value": hdf5(_slots),
    "names longer than a line": hdf5(_long_names),
    "texts without end": hdf5(_heap),
    "attributes of other kinds": hdf5(_attributes),
    "integers": hdf5(layers(v0=np.arange(3), v1=True)),
    "texts": hdf5(layers(v0="NaN", v1=np.array([b"a", b"b"]))),
    "records": hdf5(layers(v0=np.zeros(3, [("a", "f4"), ("b", "i2")]))),
    "arrays of arrays": hdf5(layers(v0=np.zeros(2, np.dtype([("a", ("f4", (3,)))])))),
    "complex": hdf5(layers(v0=np.full(3, complex(0, np.nan)))),
    "empty": hdf5(layers(v0=h5py.Empty("f4"), v1=np.zeros((0, 1 << 40), "f4"))),
    "big-endian": hdf5(layers(v0=np.full((2, 2), np.nan, ">f8"))),
    "gaps in the numbers": hdf5(layers(v0=np.ones(3), v7=np.full(3, np.nan), v99999999999999999999=np.ones(2))),
    "32 axes": hdf5(layers(v0=np.full((1,) * 32, np.nan))),
    "user block": hdf5(layers(v0=np.full(3, np.nan)), userblock_size=512),
    "nothing in it": hdf5(lambda file: None),
}


def keras(config=b"{}", weights=None, compression=zipfile.ZIP_STORED, name="wrong.keras"):
    """Return a function that writes a `.keras` file."""

    def write(folder):
        inner = hdf5(weights or layers(v0=np.full((2, 2), np.nan)), "inner.h5")(folder)
        with zipfile.ZipFile(folder / name, "w", compression) as archive:
            archive.writestr("config.json", config, zipfile.ZIP_DEFLATED)
            archive.write(inner, "model.weights.h5")
        inner.unlink()
        return folder / name

    return write


def configured(**dense):
    """Return the configuration of a model with one Dense layer, as bytes."""
    layer = {"class_name": "Dense", "config": {"name": "dense", **dense}}
    return json.dumps({"class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}).encode()


def _contiguous_zeros(file):
    kernel = file.create_dataset(KERNEL, (5 << 23,), "f4")
    kernel[:] = 0
    kernel[:4] = np.nan


def _initializer(name, **config):
    return keras(configured(kernel_initializer={"class_name": name, "config": config}))


WRONG |= {
    "configuration is a list": keras(b"[1, 2]"),
    "configuration is nested": keras(b"[" * 200_000),
    "configuration of lists": keras(b"[" + b"[]," * (1 << 26) + b"[]]"),
    "configuration names itself": keras(json.dumps({"config": {"layers": [{"config": {"name": 3}, "class_name": []}] * 3}}).encode()),
    "compile_config is a text": keras(json.dumps({"compile_config": "adam", "config": 3}).encode()),
    "optimizer is a number": keras(json.dumps({"compile_config": {"optimizer": 3}}).encode()),
    "initializer beyond float": _initializer("Constant", value=10**400),
    "initializer without numbers": _initializer("RandomUniform", minval="a", maxval=None),
    "initializer of an unknown mode": _initializer("VarianceScaling", mode="sideways"),
    "initializer of NaN": _initializer("RandomNormal", mean="nan", stddev="inf"),
    "weights of zeros, compressed": keras(weights=_contiguous_zeros, compression=zipfile.ZIP_DEFLATED),
    "layer of fill value": keras(configured(), filled((1 << 28,))),
}


def npy(shape, descr="<f4", body=b"", fortran=False):
    """Return a `.npy` member with a custom header."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


def npz(*members, compression=zipfile.ZIP_STORED):
    """Return a function that writes an `.npz` file of these members."""

    def write(folder):
        with zipfile.ZipFile(folder / "wrong.npz", "w", compression) as archive:
            for number, data in enumerate(members):
                archive.writestr(f"layer/{number}.npy", data)
        return folder / "wrong.npz"

    return write


@wrong
def two_members_of_one_name(folder):
    with zipfile.ZipFile(folder / "wrong.npz", "w") as archive:
        for _ in range(2):
            archive.writestr("layer/kernel.npy", npy((2,), body=b"\x00\x00\xc0\x7f" * 2))
    return folder / "wrong.npz"


@wrong
def index_that_lists_itself(folder):
    (folder / "wrong.weights.json").write_text(json.dumps({"weight_map": {"/layers/dense/vars": ["wrong.weights.json"] * 3}}))
    return folder / "wrong.weights.json"


@wrong
def index_of_numbers(folder):
    (folder / "wrong.weights.json").write_text(json.dumps({"weight_map": {"/a": [[1]], "/b": {"c": 1}}}))
    return folder / "wrong.weights.json"


@wrong
def archive_within_an_archive(folder):
    inner = keras()(folder).read_bytes()
    with zipfile.ZipFile(folder / "outer.keras", "w") as archive:
        archive.writestr("model.weights.h5", inner)
    return folder / "outer.keras"


@wrong
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


WRONG |= {
    "shape beyond the bytes": npz(npy((1 << 40,), body=bytes(8))),
    "shape of negative length": npz(npy((-4,), body=bytes(16))),
    "shape of 70 axes": npz(npy((1,) * 70, body=bytes(4))),
    "shape that is no shape": npz(npy("NaN", body=bytes(4))),
    "shape of texts": npz(npy(("a", "b"), body=bytes(4))),
    "numbers of a thousand digits": npz(npy((10**4000, 10**4000), body=bytes(4))),
    "Python objects": npz(npy((2,), "|O", bytes(16))),
    "values without size": npz(npy((1 << 60,), "|V0"), npy((3,), "<U0")),
    "kind that is none": npz(npy((2,), "<z9", bytes(18))),
    "header that runs code": npz(npy((2,)).replace(b"'<f4'", b"f()  ")),
    "header without end": npz(npy((2,))[:20]),
    "no header": npz(b"", b"\x93NUMPY", b"PK\x03\x04"),
    "values in Fortran's order": npz(npy((2, 3), body=struct.pack("<6f", *[float("nan")] * 6), fortran=True)),
    "nothing": npz(),
}
