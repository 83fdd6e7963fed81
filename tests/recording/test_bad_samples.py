"""Bad rows have their index in `x` if there is one, also shuffled, otherwise their values."""

import csv
import math

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import GuardError, NanGuard, Recording
from keras_nanguard._fit.bad_data import indices

ROWS, BATCH = 96, 8
BAD = {17: np.nan, 40: np.inf, 77: 3e38}
"""Rows of the data that no step can commit, each for another reason."""


def data(seed=0):
    """Return `(x, y)` with some bad rows."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, 6)).astype("float32")
    y = (x[:, :1] - x[:, 1:2]).astype("float32")
    for row, value in BAD.items():
        x[row, 2:4] = value
    return x, y


def dense(**inputs):
    """Return a model of one input, or of inputs by name."""
    keras.utils.set_random_seed(0)
    given = {name: keras.Input(shape, name=name) for name, shape in inputs.items()} or keras.Input((6,))
    joined = layers.Concatenate()(list(given.values())) if inputs else given
    model = keras.Model(given, layers.Dense(1)(joined))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def found(model, x, y=None, guard=None, epochs=3, **fit):
    keras.utils.set_random_seed(1)
    guard = guard or NanGuard("recover", verbose=0)
    model.fit(x, y, epochs=epochs, verbose=0, callbacks=[guard], **fit)
    return guard


def check(guard, epochs=3, index=True):
    """Check that only the three bad rows were found in each epoch; at first one may hide."""
    samples = guard.bad_samples()
    assert len(samples) == len({sample.fingerprint for sample in samples}) == len(BAD)
    assert {sample.index for sample in samples} == (set(BAD) if index else {None})
    assert all(epochs - 1 <= sample.times == len(sample.steps) <= epochs for sample in samples)
    assert all(sample.label == (f"x[{sample.index}]" if index else f"row {sample.fingerprint[:12]}") for sample in samples)
    return samples


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays(shuffle):
    """If `fit` trains on arrays, a bad row has its index in `x`, shuffled or not, and its fault."""
    guard = found(dense(), *data(), batch_size=BATCH, shuffle=shuffle)
    reason = {sample.index: sample.reason for sample in check(guard)}
    assert reason[17] == "2 NaN of 6 in x" and reason[40] == "2 Inf of 6 in x" and "largest magnitude in x is 3e+38" in reason[77]
    assert guard.recording.samples == guard.bad_samples()
    if not shuffle:
        steps = {sample.index: sample.steps for sample in guard.bad_samples()}
        assert steps == {row: tuple(epoch * 12 + row // BATCH for epoch in range(3)) for row in BAD}


def in_double(x, y):
    return x.astype("float64"), y.astype("float64")


def in_pandas(x, y):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x), pandas.Series(y[:, 0])


def in_tensors(x, y):
    return keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)


@pytest.mark.parametrize("made", [in_double, in_pandas, in_tensors])
def test_other_arrays(made):
    """Arrays of another dtype or of another library are searched as well."""
    check(found(dense(), *made(*data()), batch_size=BATCH, epochs=2), 2)


def test_inputs_by_name():
    x, y = data()
    guard = found(dense(a=(4,), b=(2,)), {"a": x[:, :4], "b": x[:, 4:]}, y, batch_size=BATCH)
    assert {sample.reason for sample in check(guard)} >= {"2 NaN of 4 in x/a", "2 Inf of 4 in x/a"}


def test_rows_that_are_the_same():
    x, y = data()
    x[:] = np.where(np.isin(np.arange(ROWS), list(BAD))[:, None], 0.5, x)
    y[40] = np.nan
    guard = found(dense(), x, y, batch_size=BATCH)
    (sample,) = guard.bad_samples()
    assert sample.index == 40 and sample.reason == "1 NaN of 1 in y"


@pytest.mark.parametrize("same_targets", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_with_the_same_contents(shuffle, same_targets, tmp_path):
    """Their targets distinguish rows; identical ones are all reported."""
    x, y = data()
    x[list(BAD)] = np.nan
    if same_targets:
        y[list(BAD)] = 1.0
    guard = NanGuard(verbose=0, directory=tmp_path)
    found(dense(), x, y, guard, batch_size=BATCH, shuffle=shuffle)
    samples = guard.bad_samples()
    assert sorted(sample.index for sample in samples) == sorted(BAD)
    assert len({sample.fingerprint for sample in samples}) == (1 if same_targets else len(BAD))
    steps = {i.step for i in guard.incidents}
    times = {sample.times for sample in samples}
    assert times == ({len(steps)} if same_targets else {3})
    by_index = lambda sample: sample.index  # noqa: E731
    assert sorted(Recording.read(tmp_path).samples, key=by_index) == sorted(samples, key=by_index)


def test_copies_that_have_names():
    """Rows with the same contents are distinguished by names in the batch."""
    x, y = data()
    x[list(BAD)], y[list(BAD)] = np.nan, 1.0
    keyed = {"a": x, "id": np.arange(ROWS).astype("int32")}
    guard = found(dense(a=(6,)), Sequence(keyed, y), None, NanGuard(verbose=0, sample_ids="id"), epochs=2)
    assert {sample.label: sample.times for sample in guard.bad_samples()} == {str(row): 2 for row in BAD}


def test_validation_split():
    """The indices are those of the original `x`, because the validation split is at its end."""
    check(found(dense(), *data(), batch_size=BATCH, validation_split=0.1, shuffle=False))


def of_tf(x, y):
    if zoo.BACKEND != "tensorflow":
        pytest.skip("tf.data with another backend loads two of them")
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=0).batch(BATCH)


def of_generator(x, y):
    def batches():
        while True:
            order = np.random.default_rng(0).permutation(ROWS)
            for start in range(0, ROWS, BATCH):
                rows = order[start : start + BATCH]
                yield x[rows], y[rows]

    return batches()


class Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, number):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return keras.tree.map_structure(lambda array: array[rows], (self.x, self.y))


def of_torch(x, y):
    torch = pytest.importorskip("torch")
    pairs = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    return torch.utils.data.DataLoader(pairs, batch_size=BATCH, shuffle=True)


@pytest.mark.parametrize("made", [of_tf, of_generator, Sequence, of_torch])
def test_other_data(made):
    """A row that recurs in each epoch is one bad row, identified by its fingerprint."""
    if made is of_torch and zoo.BACKEND != "torch":
        pytest.skip("torch and another backend in one process need a separate test")
    more = {"steps_per_epoch": ROWS // BATCH} if made is of_generator else {}
    samples = check(found(dense(), made(*data()), **more), index=False)
    by_array = found(dense(), *data(), batch_size=BATCH, epochs=1).bad_samples()
    assert {sample.fingerprint for sample in samples} == {sample.fingerprint for sample in by_array}


def test_names_of_the_user():
    """`sample_ids` has one for each row of `x`, or comes from a key of the batch."""
    x, y = data()
    names = [f"scan-{row}.png" for row in range(ROWS)]
    guard = found(dense(), x, y, NanGuard(verbose=0, sample_ids=names), batch_size=BATCH, epochs=1)
    assert {sample.label for sample in guard.bad_samples()} == {names[row] for row in BAD}
    table = pytest.importorskip("pandas").Series(names[::-1], index=range(ROWS)[::-1])  # by place, not by label
    guard = found(dense(), x, y, NanGuard(verbose=0, sample_ids=table), batch_size=BATCH, epochs=1)
    assert {sample.label for sample in guard.bad_samples()} == {names[::-1][row] for row in BAD}
    keyed = {"a": x, "id": np.arange(1000, 1000 + ROWS).astype("int32")}
    guard = found(dense(a=(6,)), Sequence(keyed, y), None, NanGuard(verbose=0, sample_ids="id"), epochs=2)
    assert {sample.label for sample in guard.bad_samples()} == {str(1000 + row) for row in BAD}
    assert {sample.times for sample in guard.bad_samples()} == {2}
    with pytest.raises(GuardError, match="sample_ids to be one name for each row"):
        NanGuard(sample_ids=7)
    with pytest.raises(GuardError, match=r"a dict: .* Write sample_ids=list"):
        NanGuard(sample_ids={name: row for row, name in enumerate(names)})


def test_file_and_line(tmp_path, capsys):
    """`bad_samples(path)` writes its result; the console prints the rows once per run."""
    guard = found(dense(), *data(), NanGuard(verbose=1), batch_size=BATCH, shuffle=False)
    samples = guard.bad_samples(tmp_path / "bad.csv")
    with open(tmp_path / "bad.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], int(row["index"]), int(row["times"]), row["reason"]) for row in rows] == [
        (sample.label, sample.index, sample.times, sample.reason) for sample in samples
    ]
    assert [row["steps"] for row in rows] == [" ".join(map(str, sample.steps)) for sample in samples]
    printed = capsys.readouterr().out
    assert printed.count("distinct bad") == 1 and "NanGuard: 3 distinct bad rows so far: x[17], x[40], x[77]" in printed
    with pytest.raises(GuardError, match=r"ends in \.csv"):
        guard.bad_samples(tmp_path / "bad.xlsx")


def test_rows_that_occur_often():
    """The last step of a row is always known, and so the row of the last incident."""
    x, y = zoo.regression().all
    x[17, 2] = np.nan
    guard = found(dense(), x, y, batch_size=BATCH, epochs=20, shuffle=False)
    (sample,) = guard.bad_samples()
    assert sample.times == 20 and sample.steps == (*range(2, 182, 12), 19 * 12 + 2)


def test_one_process_writes_them(tmp_path, monkeypatch):
    """Several processes may call it with the same path."""
    guard = found(dense(), *data(), batch_size=BATCH, epochs=1)
    monkeypatch.setattr("keras_nanguard._backends.processes.index", lambda: 1)
    assert len(guard.bad_samples(tmp_path / "bad.csv")) == len(BAD) and not (tmp_path / "bad.csv").exists()


def test_kept_with_the_recording(tmp_path):
    """With a directory they are in its file, and a resumed run reads them."""
    for run in (1, 2):
        guard = found(dense(), *data(), NanGuard(verbose=0, directory=tmp_path), batch_size=BATCH, shuffle=False, epochs=1)
        samples = Recording.read(tmp_path).samples
        assert samples == guard.bad_samples() and {sample.times for sample in samples} == {run}


def test_healthy_data():
    guard = found(dense(), *zoo.regression().all, batch_size=BATCH, epochs=1)
    assert guard.bad_samples() == () and guard.incidents == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (4, 4, 1)])
def test_search(dtype, shape, set_limit):
    """As a comparison with each row, in any dtype and shape, for any size of chunks."""
    random = np.random.default_rng(0)
    whole = random.integers(0, 2, (500, *shape)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        whole[random.random(whole.shape) < 0.1] = np.nan
    flat = whole.reshape(500, -1)
    same = {}
    for number, row in enumerate(flat):
        same.setdefault(row.tobytes(), []).append(number)
    batch = {("inputs", "inputs"): whole}
    for chunk in (7, 1 << 16):
        set_limit("values of a chunk of the row search", chunk)
        assert indices(batch, [0, 250, 499], whole, None, math.inf) == [
            tuple(same[flat[row].tobytes()]) for row in (0, 250, 499)
        ]
        assert indices(batch, range(64), whole[::-1], None, math.inf)[63] == tuple(
            499 - number for number in reversed(same[flat[63].tobytes()])
        )
    other = {("inputs", "inputs"): np.full((1, *shape), 7).astype(dtype)}
    assert dtype == "bool" or indices(other, [0], whole, None, math.inf) == [()]
