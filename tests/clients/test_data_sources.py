"""All data that `fit` accepts: guarded runs end as plain ones, one bad batch is refused."""

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard


class Sequence(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, data, **workers):
        super().__init__(**workers)
        self.data = data

    def __len__(self):
        return len(self.data.x) // zoo.BATCH

    def __getitem__(self, number):
        rows = slice(number * zoo.BATCH, (number + 1) * zoo.BATCH)
        return self.data.x[rows], self.data.y[rows]


def generator(data):
    def batches():
        while True:
            yield from Sequence(data)

    return batches(), {"steps_per_epoch": len(Sequence(data))}


def workers(data):
    return Sequence(data, workers=2, use_multiprocessing=False, max_queue_size=4), {"shuffle": False}


def processes(data):
    return Sequence(data, workers=2, use_multiprocessing=True, max_queue_size=4), {"shuffle": False}


def sequence(data):
    return Sequence(data), {"shuffle": False}


def torch_loader(data):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    return torch.utils.data.DataLoader(pairs, batch_size=zoo.BATCH), {}


def grain_loader(data):
    grain = pytest.importorskip("grain", reason="grain is not installed: pip install grain")
    rows = [(x, y) for x, y in zip(data.x, data.y, strict=True)]
    return grain.MapDataset.source(rows).batch(zoo.BATCH).to_iter_dataset(), {}


def datasets_of(data):
    datasets = pytest.importorskip("datasets", exc_type=ImportError, reason="datasets is not installed: pip install datasets")
    return datasets.Dataset.from_dict({"x": data.x.tolist(), "y": data.y.tolist()})


def datasets_to_tf(data):
    batches = datasets_of(data).to_tf_dataset(columns="x", label_cols="y", batch_size=zoo.BATCH, shuffle=False)
    return batches, {}


def datasets_as_numpy(data):
    rows = datasets_of(data).with_format("numpy")
    return np.asarray(rows["x"][:], "float32"), {"y": np.asarray(rows["y"][:], "float32"), "batch_size": zoo.BATCH, "shuffle": False}


def datasets_as_torch(data):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def together(rows):
        return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])

    return torch.utils.data.DataLoader(datasets_of(data).with_format("torch"), batch_size=zoo.BATCH, collate_fn=together), {}


def tf_dataset(prepared):
    def make(data):
        tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
        return prepared(tf.data.Dataset.from_tensor_slices((data.x, data.y)).batch(zoo.BATCH), tf), {}

    return make


def pandas_frames(data):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame(data.x), {"y": pandas.DataFrame(data.y), "batch_size": zoo.BATCH, "shuffle": False}


SOURCES = {
    "PyDataset": sequence,
    "generator": generator,
    "DataLoader": torch_loader,
    "DataFrame": pandas_frames,
    "tf.data": tf_dataset(lambda batches, tf: batches.cache().prefetch(2)),
    "tf.data, parallel": tf_dataset(lambda batches, tf: batches.map(lambda x, y: (x, y), num_parallel_calls=2)),
    "grain": grain_loader,
    "datasets, to_tf_dataset": datasets_to_tf,
    "datasets, numpy": datasets_as_numpy,
    "datasets, torch": datasets_as_torch,
}
ORDERED = {**SOURCES, "workers": workers} if zoo.BACKEND == "tensorflow" else SOURCES
SLOW = {"tf.data, parallel", "grain", "workers", *(name for name in SOURCES if name.startswith("datasets"))}


def regression(bad):
    data = zoo.regression()
    return zoo.poison(data, 5) if bad else data


def run(make, data, guard=None, epochs=2):
    given, settings = make(data)
    keras.utils.set_random_seed(0)
    model = zoo.plain(rounded=True)
    keras.utils.set_random_seed(1)
    callbacks = [] if guard is None else [guard]
    history = model.fit(given, epochs=epochs, verbose=0, callbacks=callbacks, **settings).history
    return history, zoo.state_of(model)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ORDERED])
def test_plain_is_guarded_and_a_bad_batch_is_refused(name):
    """Prints nothing, same result; a bad batch: one step skipped per epoch, a finite state."""
    zoo.refuses_one_batch(lambda guard, bad: run(ORDERED[name], regression(bad), guard))


@pytest.mark.requires_backend("tensorflow", reason="tf.data with another backend loads two of them")
def test_data_of_unknown_length():
    """Its length is known after the first epoch, at whose end stock Keras begins one more step without a batch."""
    make, guard = tf_dataset(lambda batches, tf: batches.filter(lambda x, y: True)), NanGuard(verbose=0)
    (plain, _), (guarded, _) = (run(make, regression(False), one, epochs=1) for one in (None, guard))
    assert guard.incidents == [] and zoo.plain_logs(guarded) == plain
    history, state = run(make, regression(True), NanGuard(verbose=0))
    assert history["refused_steps"] == [1, 1] and all(np.isfinite(array).all() for _, array in state)


@pytest.mark.slow
@pytest.mark.parametrize("make", [workers, processes])
def test_workers(make):
    """With workers the order of batches may vary; the bad batch is refused in any order."""
    if make is processes and zoo.BACKEND == "jax":
        pytest.skip("a process that runs JAX must not be forked")
    guard = NanGuard(verbose=0, diagnose=False)
    history, state = run(make, zoo.poison(zoo.regression(), 5), guard)
    assert sum(history["refused_steps"]) >= 1 and all(np.isfinite(value).all() for _, value in state)
    healthy = NanGuard(verbose=0, diagnose=False)
    run(make, zoo.regression(), healthy)
    assert healthy.incidents == []


def sparse_of(data):
    scipy = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    found = data.x.copy()
    found[found < 0] = 0
    return scipy.csr_matrix(found)


def sparse_run(data, guard=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,), sparse=True), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    settings = {"batch_size": zoo.BATCH, "epochs": 1, "shuffle": False, "verbose": 0}
    history = model.fit(sparse_of(data), data.y, callbacks=[guard] if guard else [], **settings).history
    return history, zoo.state_of(model)


@pytest.mark.requires_backend("tensorflow", "jax", reason="Keras has no sparse tensors on PyTorch")
def test_scipy_sparse():
    """A sparse tensor for Keras; NaN in a batch is refused, and the matrix row is reported."""
    guard = zoo.refuses_one_batch(lambda guard, bad: sparse_run(regression(bad), guard), epochs=1)
    assert guard.incidents[0].diagnosis.cause == "input_nonfinite" and guard.incidents[0].diagnosis.samples == (2,)
    assert [sample.index for sample in guard.bad_samples()] == [5 * zoo.BATCH + 2]


@pytest.mark.slow
@pytest.mark.requires_backend("tensorflow", reason="tensors of TensorFlow's own")
@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_tensors_of_tensorflow(kind):
    """Sparse or ragged, passed on unchanged: plain and guarded agree, a bad batch is refused."""
    import tensorflow as tf

    class Dense(keras.layers.Layer):
        def call(self, x):
            return x.to_tensor(shape=(None, 6)) if isinstance(x, tf.RaggedTensor) else tf.sparse.to_dense(x)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = Dense(), keras.layers.Dense(1)

        def call(self, x):
            return self.last(keras.ops.reshape(self.first(x), (-1, 6)))

    def fit(guard, bad):
        data = regression(bad)
        x = tf.sparse.from_dense(data.x) if kind == "sparse" else tf.RaggedTensor.from_row_lengths(data.x.reshape(-1), [6] * len(data.x))
        keras.utils.set_random_seed(0)
        model = Model()
        model.compile("adam", "mse")
        batches = tf.data.Dataset.from_tensor_slices((x, data.y)).batch(zoo.BATCH)
        history = model.fit(batches, epochs=2, verbose=0, callbacks=[guard] if guard else []).history
        return history, zoo.state_of(model)

    diagnosis = zoo.refuses_one_batch(fit).incidents[0].diagnosis
    assert (diagnosis.cause, diagnosis.samples) == ("input_nonfinite", (2,))
