"""The transaction of TensorFlow without a fit: one step or several per execution."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import zoo
from support.tensorflow_steps import (
    BAD,
    KEPT,
    SIZE,
    STEPS,
    WITH_BAD,
    Away,
    Bursting,
    Retrace,
    TrainState,
    X,
    Y,
    alone,
    batches,
    execution,
    facts,
    network,
    read,
    run,
    spoiled,
    state,
    trained,
)

from keras_nanguard import NanGuard
from keras_nanguard._backends.tensorflow import reductions
from keras_nanguard._core import finiteness

WAYS = ("deferred", "kept", "compiled", "eager")
"""Updates after the verdict; updates with stored old values; compiled by XLA; no graph."""


@pytest.mark.parametrize("several", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("way", WAYS)
def test_bad_steps(way, several):
    """They change nothing; reports have numbers, batches and all bad sites."""
    plain, model = network(), network()
    expected = trained(plain, batches(X, KEPT), way)
    for step in BAD:
        expected.insert(step, expected[step - 1])
    transaction = alone(model, way, several=several)
    logs, verdicts, reports = run(transaction, batches(WITH_BAD), several, way)
    zoo.assert_same(state(model), state(plain), 1e-5 if "compiled" in way else 0.0)
    for step, one in zip(range(several - 1, STEPS, several), logs, strict=True):
        assert step in BAD or one == pytest.approx(expected[step], rel=1e-5)
    numbers = range(STEPS) if several > 1 else [0] * STEPS
    assert [(v.refused, v.step, v.halted, v.scale) for v in verdicts] == [(i in BAD, n, False, 1.0) for i, n in enumerate(numbers)]
    assert all(np.isfinite([*v]).all() or v.refused for v in verdicts)
    assert [str(report.verdict) for report in reports] == [str(v) for v in verdicts if v.refused]
    at_once = way in ("kept", "eager")
    norm = model.layers[1]
    output = ("outputs", model.layers[-1].name)
    bad = [output, *(("statistics", v.path) for v in (norm.moving_mean, norm.moving_variance))]
    bad += [("gradients", v.path) for v in model.trainable_variables]
    bad += [("weights", v.path) for v in model.trainable_variables if at_once]
    bad += [("slots", v.path) for v in model.optimizer.variables if at_once and "momentum" in v.path]
    for report, step in zip(reports, BAD, strict=True):
        for part, whole in zip(report.batch[0], (WITH_BAD, Y)):
            np.testing.assert_array_equal(part, whole[step])
        rows = {row: tuple(count) for row, count in zip(report.rows, report.counts, strict=True)}
        assert {row for row, (nan, _, _) in rows.items() if nan} >= set(bad)
        assert {site for site, _ in rows} == {site for site, _ in bad}
        written = {path for site, path in bad if site == "statistics"}
        assert {path for site, path in rows if site == "statistics"} == written
        assert rows[output] == (SIZE, 0, SIZE) and not any(inf for _, inf, _ in rows.values())


@pytest.mark.parametrize(("way", "programs"), [("deferred", 0), ("kept", 0), ("compiled", 1)])
def test_the_part_that_xla_compiles(way, programs):
    """If the model is compiled by XLA, the step is, as one program, and nothing else."""
    transaction = alone(network(), way)
    batch = batches(X)[0]
    library = execution(transaction, way).get_concrete_function(batch).graph.as_graph_def().library
    assert sum("_XlaMustCompile" in f.attr and f.attr["_XlaMustCompile"].b for f in library.function) == programs


@pytest.mark.daily("deferred", "eager")
@pytest.mark.parametrize("way", ["deferred", "kept", "compiled", "eager"])
def test_bad_steps_that_are_watched(way):
    """Without refusals a step has its plain effect, a verdict and a report."""
    plain, model = network(), network()
    expected = trained(plain, batches(WITH_BAD), way)
    logs, verdicts, reports = run(alone(model, way, refuse=False), batches(WITH_BAD), 1, way)
    zoo.assert_same(state(model), state(plain), 1e-5 if "compiled" in way else 0.0)
    for one, other in zip(logs, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, nan_ok=True)
    assert [v.finite for v in verdicts] == [step < BAD[0] for step in range(STEPS)] and not any(v.refused for v in verdicts)
    assert len(reports) == STEPS - BAD[0] and not any(report.verdict.refused for report in reports)
    np.testing.assert_array_equal(reports[0].batch[0][0], WITH_BAD[BAD[0]])
    assert {site for site, _ in reports[0].rows} == {"outputs", "gradients", "statistics", "weights", "slots"}
    assert reports[0].counts[:, 0].sum() and np.isnan(verdicts[-1].weights + verdicts[-1].slots)


@pytest.mark.daily("deferred-weights", "compiled-slots")
@pytest.mark.parametrize("where", ["weights", "slots"])
@pytest.mark.parametrize("way", ["deferred", "compiled"])
def test_steps_after_a_bad_state_change_nothing(way, where):
    """No later step of the execution changes anything until the host takes the results."""
    plain, model = (network(Bursting(where), Away(name="away"), built=False) for _ in range(2))
    trained(plain, batches(X, range(3)))
    transaction = alone(model, way, several=6)
    verdicts = run(transaction, batches(X, range(6)), 6, way)[1]
    zoo.assert_same(state(model), state(plain), 1e-5 if "compiled" in way else 0.0)
    assert [(v.refused, v.halted) for v in verdicts] == [(False, False)] * 3 + [(True, True)] * 3
    assert [v.finite for v in verdicts[:3]] == [True, True, False]
    bad, good = (verdicts[2].weights, verdicts[2].slots)[:: 1 if where == "weights" else -1]
    assert np.isinf(bad) and np.isfinite(good)
    for healed in (model, plain):
        spoiled = healed.layers[2].bias if where == "weights" else healed.optimizer.spare
        spoiled.assign(tf.zeros((2,)))
    assert not transaction.reused
    transaction.release_run()
    transaction.rebind(facts(model, []))  # another run begins
    assert transaction.reused and not any(v.refused for v in run(transaction, batches(X, range(4)), 2, way)[1])
    trained(plain, batches(X, range(4)))
    zoo.assert_same(state(model), state(plain), 1e-5 if "compiled" in way else 0.0)


class Saturated(Away):
    """Only its gradient is bad if its weights are infinite."""

    def call(self, x):
        return tf.tanh(x * (1.0 + self.bias))


@pytest.mark.daily("deferred")
@pytest.mark.parametrize("way", ["deferred", "compiled"])
def test_halted_steps_do_not_lower_the_loss_scale(way):
    """Their gradients are bad because of the state, not of the scale."""
    optimizer = keras.optimizers.LossScaleOptimizer(Bursting("weights"), initial_scale=64.0)
    model = network(optimizer, Saturated(name="away"), built=False)
    verdicts = run(alone(model, way, several=6), batches(X, range(6)), 6, way)[1]
    assert [v.halted for v in verdicts] == [False] * 3 + [True] * 3
    assert all(np.isfinite(v.loss) and not np.isfinite(v.gradients) for v in verdicts[3:])
    assert (float(optimizer.dynamic_scale), int(optimizer.step_counter)) == (64.0, 3)


class Marks(layers.Layer):
    """Records an infinite value for a large number, which it passes on as a small one."""

    def build(self, shape):
        self.mark = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mark")

    def call(self, x, training=False):
        if training:
            self.mark.assign(tf.where(tf.reduce_max(tf.abs(x)) > 50, np.float32("inf"), self.mark.value + 1.0))
        return tf.clip_by_value(x, -3.0, 3.0)


ALONE = [(what, way) for what in ("loss", "gradients", "statistics") for way in ("deferred", "kept", "eager")]
ALONE += [(what, way) for what in ("weights", "slots") for way in ("kept", "eager")]


@pytest.mark.daily("*-deferred", "weights-kept", "slots-eager")
@pytest.mark.parametrize(("what", "way"), ALONE)
def test_each_sum_alone(what, way):
    """One bad sum is enough to refuse the step, and is the only one reported."""
    inside, bad = what in ("weights", "slots"), [2] if what in ("weights", "slots") else [*BAD]
    plain, model = (network(Bursting(what) if inside else None, Marks(), Away(name="away"), loss=spoiled(what)) for _ in range(2))
    x, y = X.copy(), Y.copy()
    if not inside:
        (x if what == "statistics" else y)[bad, 2] = 100.0
    if what == "statistics":
        for one in (plain, model):
            one.layers[1].trainable = False  # it would hand on what is large as something small
    given = [(tf.constant(a), tf.constant(b)) for a, b in zip(x, y)]
    steps = 3 if inside else STEPS
    trained(plain, [given[step] for step in range(steps) if step not in bad], way)
    _, verdicts, reports = run(alone(model, way), given[:steps], 1, way)
    assert [v.refused for v in verdicts] == [step in bad for step in range(steps)]
    zoo.assert_same(state(model), state(plain), 1e-5 if "compiled" in way else 0.0)
    told = {what, "weights", "slots"} if what == "gradients" and way in ("kept", "eager") else {what}
    assert [{finding.site for finding in report.findings()} for report in reports] == [told] * len(bad)


@pytest.mark.parametrize("ref", [False, True])
def test_which_entries_can_be_bad(ref):
    """Those that TensorFlow calls floating or complex; not those of integers, strings and resources."""
    kinds = [kind for kind in vars(tf.dtypes).values() if isinstance(kind, tf.DType)]
    kinds = {kind._as_ref if ref else kind for kind in kinds if kind != tf.variant}
    found = {kind for kind in kinds if finiteness.is_inexact(SimpleNamespace(dtype=kind))}
    assert found == {kind for kind in kinds if kind.is_floating or kind.is_complex} and len(found) > 5
    assert {kind.is_integer for kind in kinds - found} == {True, False}


def test_a_complex_entry_may_be_both_nan_and_infinite():
    """It counts as both, as on the other backends."""
    entries = np.array([complex(np.nan, np.inf), complex(0, np.nan), complex(-np.inf, 1), 1], "complex64")
    found = reductions.Reading([tf.constant(entries)]).counts().numpy()
    assert found.tolist() == [[2, 2, 4]] and finiteness.counts(entries) == (2, 2, 4)


@pytest.mark.daily("True-deferred", "False-kept", "True-eager")
@pytest.mark.parametrize("way", ["deferred", "kept", "eager"])
@pytest.mark.parametrize("built", [True, False])
def test_a_loss_scale(way, built):
    """It is halved if only the gradients are bad, as in stock Keras, and grows otherwise."""

    def scaled():
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=2)

    plain, model = (network(scaled(), loss=spoiled("gradients"), built=built) for _ in range(2))
    y = Y.copy()
    y[[0, *BAD], 2] = 100.0
    given = [(tf.constant(a), tf.constant(b)) for a, b in zip(X, y)]
    execute, transaction, scales = execution(plain.train_step, way), alone(model, way), []
    for batch in given:
        execute(batch)
        (verdict,) = run(transaction, [batch], 1, way)[1]
        scales.append([float(v) for m in (plain, model) for v in (m.optimizer.dynamic_scale, m.optimizer.step_counter)])
        assert verdict.only_gradients == verdict.refused
    assert all(one[:2] == one[2:] for one in scales) and len({one[0] for one in scales}) == 3
    assert transaction.learned.untracked == {} and transaction.learned.updates_first == (way == "kept")
    weights = [[np.array(v) for v in (*m.trainable_variables, *m.optimizer.variables)] for m in (plain, model)]
    zoo.assert_same(*weights)
    for bad in (0.0, np.inf):
        model.optimizer.dynamic_scale.assign(bad)
        before, counter = state(model), int(model.optimizer.step_counter)
        (verdict,) = run(transaction, batches(X, [3]), 1, way)[1]
        assert verdict.refused and verdict.scale == bad and float(model.optimizer.dynamic_scale) == 1024.0
        assert int(model.optimizer.step_counter) == 0
        model.optimizer.dynamic_scale.assign(bad)
        model.optimizer.step_counter.assign(counter)
        zoo.assert_same(state(model), before)


@pytest.mark.daily("deferred", "eager")
@pytest.mark.parametrize("way", ["deferred", "kept", "eager"])
def test_intended_infinite_values(way):
    """Variables that a step does not write, or that may be infinite, are in no sum."""
    model = network()
    model.mark = model.add_weight(shape=(), initializer=keras.initializers.Constant(np.inf), trainable=False, name="mark")
    transaction = alone(model, way)
    if way == "eager":  # nothing shows what such a step writes
        assert run(transaction, batches(X, [0]), 1, way)[1][0].refused
        transaction.tolerate([model.mark])
    (verdict,) = run(transaction, batches(X, [0]), 1, way)[1]
    assert not verdict.refused and np.isfinite(verdict.statistics)


def test_a_tape_around_a_step_watches_the_weights_alone():
    """The variables of the guard are not watched by a gradient tape."""
    model = network()
    transaction = alone(model, several=2)

    def watched(batch):
        with tf.GradientTape() as tape:
            transaction(batch)
        return [id(variable) for variable in tape.watched_variables()]

    found = []
    tf.function(lambda batch: found.extend(watched(batch)), autograph=False)(batches(X, [0])[0])
    assert set(found) <= {id(v.value) for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)}


@pytest.mark.parametrize("way", ["deferred", pytest.param("compiled", marks=pytest.mark.slow)])
def test_more_reports_than_are_kept(way, set_limit):
    """The first reports are kept; nothing waits for the others, and every verdict is read."""
    set_limit("reports of a TensorFlow program", 2)
    transaction = alone(network(), way, several=4)
    _, verdicts, found = run(transaction, batches(WITH_BAD, [BAD[0]] * 4), 4, way)
    assert [v.step for v in verdicts] == [*range(4)] and all(v.refused for v in verdicts)
    assert [report.verdict.step for report in found] == [0, 1]


@pytest.mark.parametrize("way", ["deferred", "compiled"])
def test_each_report_has_its_batch(way):
    """If nothing else stores the batches, reports have them, however late they are read."""
    model = network()
    transaction = alone(model, way, host_has_batches=False)
    execute = execution(transaction)
    for batch in batches(WITH_BAD):
        read(execute(batch))
    reports = transaction.take_reports()
    for report, step in zip(reports, BAD, strict=True):
        np.testing.assert_array_equal(report.batch[0][0], WITH_BAD[step])


@pytest.mark.parametrize("way", ["deferred", pytest.param("compiled", marks=pytest.mark.slow)])
def test_batches_that_take_much_memory(way, set_limit):
    """The first refused batch is kept, others if they fit; all counts are complete."""
    one = 4 * SIZE * (3 + 1)  # bytes of x and y
    for most, kept in ((1, [True, False, False]), (2 * one, [True, True, False])):
        set_limit("bytes of remembered batches", most)
        transaction = alone(network(), way, several=3)
        found = run(transaction, batches(WITH_BAD, [BAD[0]] * 3), 3, way)[2]
        assert [report.batch is not None for report in found] == kept
        assert all(report.counts[:, 0].any() for report in found)


@pytest.mark.parametrize("way", ["deferred", "kept"])
def test_the_bits_of_plain_descent(way):
    """TensorFlow still fuses a gradient with its rate, although the guard reads it."""
    plain, model = (network(keras.optimizers.SGD(0.05)) for _ in range(2))
    trained(plain, batches(X))
    run(alone(model, way), batches(X))
    zoo.assert_same(state(model), state(plain))


def test_a_leftover_transaction_is_removed():
    """A step is guarded only once, after any earlier run."""
    plain, model = network(), network()
    for one, callbacks in ((plain, []), (model, [NanGuard(verbose=0)])):
        if one is model:
            one.train_step = alone(model)
        one.fit(X.reshape(-1, 3), Y.reshape(-1, 1), batch_size=SIZE, shuffle=False, verbose=0, callbacks=callbacks)
    zoo.assert_same(state(model), state(plain))
    assert "train_step" not in vars(model)


class Sentinels(layers.Layer):
    """Writes the largest float32 number into ten entries, so their sum overflows."""

    def build(self, shape):
        self.mark = self.add_weight(shape=(10,), initializer="zeros", trainable=False, name="mark")

    def call(self, x, training=False):
        if training:
            self.mark.assign(tf.fill((10,), np.finfo("float32").max))
        return x


@pytest.mark.daily("deferred-loss", "kept-gradients", "eager-statistics", "compiled-weights")
@pytest.mark.parametrize("what", ["loss", "gradients", "statistics", "weights"])
@pytest.mark.parametrize("way", WAYS)
def test_finite_numbers_are_never_refused(way, what):
    """A sum that overflows over finite entries decides nothing, and is reported finite."""
    large = {"loss": 0.0, "gradients": 1e21}.get(what, 1.0)

    def loss(y, found):
        return tf.reduce_mean(tf.square(y - found)) * large + (3.3e38 if what == "loss" else 0.0)

    def made():
        rate = 1e-24 if what == "gradients" else 0.05
        model = network(keras.optimizers.SGD(rate), Sentinels(), Away(name="away"), loss=loss)
        if what == "weights":
            model.get_layer("away").bias.assign(np.full(2, 3e38, "float32"))
        return model

    plain, model = made(), made()
    trained(plain, batches(X), way)
    transaction = alone(model, way, several=2)
    _, verdicts, reports = run(transaction, batches(X), 2, way)
    assert not any(v.refused or v.halted for v in verdicts) and reports == []
    assert all(v.finite and np.isfinite(sum(v)) for v in verdicts)
    zoo.assert_same(state(model), state(plain), 1e-5 if "compiled" in way else 0.0)


# The first steps of a model


FEW, BAD_FIRST = range(5), (0, 2)
SPOILT = X.copy()
SPOILT[[*BAD_FIRST], 2, 1] = np.nan
"""Batches, the first of which is bad."""


def gradients_of(model, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.mark.parametrize("way", ["deferred", "eager"])
def test_variables_created_by_the_first_step(way):
    """A bad first step leaves the model as if unbuilt; its variables are noted once."""

    def unbuilt():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Dense(2), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        return model

    plain, model = unbuilt(), unbuilt()
    execute = execution(plain.train_step, way)
    for batch in batches(X, [step for step in FEW if step not in BAD_FIRST]):
        execute(batch)
    transaction = alone(model, way)
    verdicts = run(transaction, batches(SPOILT, FEW), 1, way)[1]
    assert [v.refused for v in verdicts] == [step in BAD_FIRST for step in FEW]
    zoo.assert_same(state(model), state(plain))
    made = {id(v.value) for v in (*model.variables, *model.optimizer.variables) if v is not model.optimizer._learning_rate}
    made |= {id(v.value) for metric in model.metrics[1:] for v in metric.variables}
    noted = [id(variable) for variable, _ in transaction.created]
    assert len(noted) == len({*noted}) and made - {*noted} <= {id(v.value) for v in model.optimizer.variables}
    assert transaction.learned.updates_first is False


@pytest.mark.daily("bad0-deferred", "bad1-deferred", "bad2-eager")
@pytest.mark.parametrize("way", ["deferred", "eager", "compiled"])
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_two_loss_scales(way, bad):
    """Each of two optimizers halves its scale if its own gradients are bad, as in Keras."""

    def made():
        scaled = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=scale) for scale in (64.0, 16.0)]
        model = network(scaled[0], built=False)
        model.second = scaled[1]
        return model

    def step(model, batch):
        loss, gradients = gradients_of(model, batch)
        spoilt = tf.where(tf.reduce_max(batch[1]) > 50, np.float32("inf"), 0.0)
        gradients = [g + spoilt if min(n, 1) in bad else g for n, g in enumerate(gradients)]
        model.optimizer.apply(gradients[:1], model.trainable_variables[:1])
        model.second.apply(gradients[1:], model.trainable_variables[1:])
        return {"loss": loss}

    plain, model = made(), made()
    execute, transaction = execution(lambda batch: step(plain, batch), way), alone(model, way, lambda batch: step(model, batch))
    y = Y.copy()
    y[[*BAD_FIRST], 1] = 100.0
    for batch in [(tf.constant(a), tf.constant(b)) for a, b in zip(X, y)]:
        execute(batch)
        run(transaction, [batch], 1, way)
        scales = [[float(o.dynamic_scale) for o in (one.optimizer, one.second)] for one in (plain, model)]
        assert scales[0] == scales[1]
    assert scales[0] == [16.0 if 0 in bad else 64.0, 4.0 if 1 in bad else 16.0]
    model.second.dynamic_scale.assign(np.inf)  # beside a finite one
    (verdict,) = run(transaction, batches(X, [3]), 1, way)[1]
    assert verdict.refused and verdict.scale == np.inf
    assert [float(o.dynamic_scale) for o in (model.optimizer, model.second)] == [scales[0][0], 16.0]


@pytest.mark.parametrize("where", ["weights", "slots"])
def test_variables_created_by_the_first_update(where):
    """An eager first step is refused if the variables that it creates are bad."""
    model = network(Bursting(where, update=0), Away(name="away"), built=False)
    before = [np.array(v) for v in model.variables]
    (verdict,) = run(alone(model, "eager"), batches(X, [0]), 1, "eager")[1]
    assert verdict.refused and np.isfinite(verdict.loss + verdict.gradients + verdict.statistics)
    zoo.assert_same([np.array(v) for v in model.variables], before)
    assert all(np.isfinite(np.array(v)).all() for v in model.optimizer.variables)


def test_a_step_that_makes_nothing():
    """It is traced once, and restores unlisted variables also in its first run."""
    model, hidden = network(), tf.Variable(tf.zeros((3,)), trainable=False)

    def body(batch):
        hidden.assign_add(tf.reduce_mean(batch[0], 0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch[0], training=True) - batch[1]))
        model.optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        return loss

    transaction = alone(model, "deferred", body, logs=False)
    before = [np.array(v) for v in (hidden, *model.variables, *model.optimizer.variables)]
    execute = execution(transaction)
    for _ in range(2):
        try:
            _, verdict = read(execute(batches(SPOILT, [0])[0]))
            break
        except Retrace as found:
            transaction.learned = found.learned
            execute = execution(transaction)
    assert verdict.refused and len(transaction.learned.untracked) == 1
    zoo.assert_same((hidden, *model.variables, *model.optimizer.variables), before)


# What is traced


def test_the_outputs_of_a_step():
    """They are unchanged, of any structure; scalars among them are losses."""
    weight = keras.Variable(np.ones((3, 1), "float32"))
    model = keras.Sequential([keras.Input((3,))])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])

    def body(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            error = tf.square(x @ weight - y)
        optimizer.apply([tape.gradient(error, weight.value)], [weight])
        rows = tf.RaggedTensor.from_row_lengths(error[:, 0], [1, SIZE - 1])
        return {"rows": rows, "none": None, "entries": tf.sparse.from_dense(x), "more": [tf.reduce_mean(error), tf.shape(x)[0]]}

    transaction = alone(model, "deferred", body, logs=False)
    transaction.run.read_train_state = lambda: TrainState.of(model, [optimizer])
    execute, plain = execution(transaction), execution(body)
    before = np.array(weight)
    for step in (0, BAD[0], 3):
        batch = batches(WITH_BAD, [step])[0]
        outputs, verdict = read(execute(batch))
        assert verdict.refused == (step in BAD) == np.array_equal(np.array(weight), before)
        after = np.array(weight)
        weight.assign(before)
        expected = plain(batch)
        assert list(outputs) == list(expected) and outputs["none"] is None
        for one, other in zip(*(tf.nest.flatten(found, expand_composites=True) for found in (outputs, expected))):
            if one is not None:
                np.testing.assert_array_equal(one, other)
        if step not in BAD:
            np.testing.assert_array_equal(weight, after)
            np.testing.assert_allclose(verdict.loss, expected["more"][0])
        weight.assign(after)
        before = after


@pytest.mark.parametrize("way", ["deferred", "compiled"])
def test_python_stays_python(way):
    """TensorFlow rejects a condition on a tensor: the user's code is not rewritten."""
    model = network()

    def body(batch):
        return model.train_step(batch) if tf.reduce_mean(batch[0]) < 9.0 else {}

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        alone(model, way, body).trace(tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batches(X)[0]))


def test_other_sizes_of_batches():
    """A compiled step is not traced for each size of batch, but once for all further ones."""
    model, traces = network(), []

    def body(batch):
        traces.append(batch)
        return model.train_step(batch)

    execute = execution(alone(model, "compiled", body))
    for size in (4, 3, 2, 1):
        execute.get_concrete_function(tuple(part[:size] for part in batches(X)[0]))
    assert len(traces) < 4
