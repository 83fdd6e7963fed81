"""Performs the actions of a decision: one function per action, which returns done, or skipped with
a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from keras_nanguard._core import atomic_files, finiteness, plain_arrays
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import SITES, Incident, Outcome
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.recovery import initial_statistics, learning
from keras_nanguard._fit.rollback import Answer, Order, newest, restore_for_good, roll_back
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    sparse_arrays,
    spread_arrays,
    variables as keras_variables,
)
from keras_nanguard._keras.whole_writes import write_all


class Performer(NamedTuple):
    """How an action is performed.

    Attributes:
        perform: performs it; returns `("done", detail)` or `("skipped", reason)`.
        writes: what it writes of weights, statistics and slots: `"nothing"`; a whole `"snapshot"`;
            `"parts"`; or `"estimates"`, statistics that the next batches estimate anew. An action
            that ends training writes `"nothing"`, because no step follows.
    """

    perform: Callable[[Order], Answer]
    writes: Literal["nothing", "snapshot", "parts", "estimates"]

    @property
    def voids_started(self) -> bool:
        """Whether steps that have started from the earlier state do not count."""
        return self.writes in ("snapshot", "parts")

    @property
    def leaves_snapshots(self) -> bool:
        """Whether training continues from a state that no snapshot leads to by a replay."""
        return self.writes in ("parts", "estimates")


def perform(run: Run, incident: Incident, report: Report | None) -> tuple[Outcome, ...]:
    """Perform every action of the incident's decision, and return the outcomes.

    An action that raises is reported as skipped with the error, and the other actions still run.
    """
    outcomes = []
    assert incident.decision is not None
    for action in incident.decision.actions:
        name = action["action"]
        parameters = {key: value for key, value in action.items() if key != "action"}
        try:
            order = Order(run, incident, report, parameters)
            status, detail = PERFORMERS[name].perform(order)
        except StateLostError:
            raise
        except Exception as problem:  # noqa: BLE001  a user's function or a broken optimizer must not end the run
            status, detail = "skipped", f"{type(problem).__name__}: {problem}"
        outcomes.append(Outcome(name, status, detail))
        if status == "done" and PERFORMERS[name].leaves_snapshots:
            run.recent.restart(run.step + 1)
    return tuple(outcomes)


def _lower_lr(order: Order) -> Answer:
    run, incident, p = order.run, order.incident, order.p
    before_update = any(SITES.index(f.site) < SITES.index("weights") for f in incident.findings)
    tried = run.recovery.tried(run.counts.committed)
    if incident.refused and before_update and not tried:
        since = "yet" if run.recovery.lowered_at is None else "since it was lowered"
        return "skipped", f"no step has committed {since}, so a lower rate has no effect"
    changed = []
    retrace = False
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rate(optimizer)
        factor = min(float(p["factor"]), incident.values.get("rate_factor", math.inf))
        before, after, anew = rate.lower(factor, p.get("min_lr", 0.0))
        retrace |= anew
        if after < before:
            changed.append(f"{optimizer.name}: {before:.3g} -> {after:.3g}")
    if retrace:
        run.access.rebuild()
    if not changed:
        return "skipped", f"the learning rate is already at min_lr={p.get('min_lr', 0.0):g}"
    diverged = any(f.kind == "divergence" for f in incident.findings)
    run.recovery.diverged |= diverged or "divergence" in incident.causes
    returns = p.get("recover_after") and not run.recovery.diverged
    run.recovery.returns = (p["recover_after"], p.get("ramp", 0)) if returns else None
    run.recovery.lowered_at = run.step, run.counts.committed
    return "done", "learning rate of " + ", ".join(changed)


def _clip(order: Order) -> Answer:
    run, p = order.run, order.p
    changed, reasons = [], []
    first, least = p["global_clipnorm"], p["min_clipnorm"]
    for optimizer in run.train_state().optimizers:
        inner = keras_optimizers.inner(optimizer)
        now = inner.global_clipnorm
        tight = max(first if now is None or now > first else now * p["factor"], least)
        if inner.clipnorm or inner.clipvalue:
            own = "clips by clipnorm or clipvalue, which Keras does not combine with a global norm"
            reasons.append(f"{inner.name} {own}")
        elif now is not None and tight >= now:
            reasons.append(f"{inner.name} already clips at {now:g}, and min_clipnorm is {least:g}")
        else:
            run.recovery.change(inner, "global_clipnorm", tight)
            changed.append(f"{inner.name}: global_clipnorm {now} -> {tight:g}")
    if not changed:
        return "skipped", ", ".join(reasons) or "there is no optimizer"
    run.access.rebuild()
    return "done", ", ".join([*changed, *reasons])


def _fix_loss_scale(order: Order) -> Answer:
    run, p = order.run, order.p
    changed = []
    for optimizer in run.train_state().optimizers:
        if not (variables := keras_optimizers.scales_of(optimizer)):
            continue
        scale, counter = variables
        before = float(keras_variables.read(scale))
        start = p["reset_to"] if p.get("reset_to") is not None else before
        start = optimizer.initial_scale if math.isnan(start) else start
        after = min(max(start, p["floor"]), p["ceiling"])
        fresh = np.zeros_like(keras_variables.read(counter))
        write_all([(scale, np.float32(after)), (counter, fresh)])
        growth = p.get("growth_steps")
        if growth:
            run.recovery.change(optimizer, "dynamic_growth_steps", growth)
        doubling = f", doubling after {growth} good steps" if growth else ""
        changed.append(f"loss scale {before:g} -> {after:g}{doubling}")
    if not changed:
        return "skipped", "the model does not scale its loss"
    run.recovery.scale_bounds = (p["floor"], p["ceiling"])
    if p.get("growth_steps"):
        run.access.rebuild()
    return "done", ", ".join(changed)


def _repair(order: Order) -> Answer:
    run, source, state = order.run, order.p["source"], order.run.train_state()
    whole = (*state.trainable, *state.statistics, *state.slots)
    bad = [v for v in whole if id(v) not in run.tolerated and not _is_finite(v)]
    if not bad:
        return "skipped", "no entry is bad"
    good = _source(run, source, bad)
    missing = [v.path for v in bad if good.get(id(v)) is None]
    if missing:
        return "skipped", f"{', '.join(missing)}: no value in source={source!r}"
    count, repaired = 0, []
    for variable in bad:
        value = keras_variables.read(variable)
        places = ~np.isfinite(finiteness.widen(value))
        value[places] = np.asarray(good[id(variable)])[places]
        repaired.append((variable, value))
        count += int(places.sum())
    write_all(repaired)
    return "done", f"{count} entries of {', '.join(v.path for v in bad)} from {source}"


def _is_finite(variable: Any) -> bool:
    return finiteness.is_finite(keras_variables.view(variable))


def _source(run: Run, source: str, variables: list[Any]) -> dict[int, Any]:
    """Return the values to write into variables, by `id`; `None` for a variable without a value in
    the source.
    """
    if source == "last_good":
        snapshot = newest(run)
        return {id(v): snapshot.value(v) for v in variables} if snapshot is not None else {}
    if source == "initializer":
        first = {id(v): keras_layers.initial_value(run.model, v) for v in variables}
        return first | _first_slots(run)
    return {id(v): np.full(tuple(v.shape), 0.0 if source == "zeros" else 1.0) for v in variables}


def _first_slots(run: Run) -> dict[int, np.ndarray[Any, Any]]:
    """Return the initial value of each slot, by `id`. Averages of the weights start with the
    present weights.
    """
    first: dict[int, np.ndarray[Any, Any]] = {}
    for optimizer in run.train_state().optimizers:
        if not optimizer.built:
            continue
        fresh = keras_optimizers.fresh_like(optimizer)
        pairs = [*zip(optimizer.variables, fresh.variables)]
        pairs += keras_optimizers.averages_of(optimizer)
        first |= {id(variable): keras_variables.read(value) for variable, value in pairs}
    return first


def _reset_batchnorm(order: Order) -> Answer:
    run, layers = order.run, keras_layers.batchnorms(order.run.model)
    if not layers:
        return "skipped", "the model has no BatchNormalization"
    values = initial_statistics(layers)
    if order.p["source"] == "last_good":
        snapshot = newest(run)
        values = [(v, snapshot.value(v) if snapshot is not None else None) for v, _ in values]
        if any(value is None for _, value in values):
            return "skipped", "there is no last good state"
    write_all(values)
    return "done", f"{len(values)} statistics reset"


def _recalibrate_batchnorm(order: Order) -> Answer:
    run, batches = order.run, order.p["batches"]
    layers = learning(run.model)
    if not layers:
        return "skipped", "the model has no BatchNormalization that learns its statistics"
    write_all(initial_statistics(layers))
    run.recovery.estimate(run.model, batches)
    what = f"the statistics of {len(layers)} layers"
    return "done", f"re-estimating {what} over the next {batches} batches"


def _reset_slots(order: Order) -> Answer:
    run = order.run
    slots = [v for v in run.train_state().slots if finiteness.is_float(v.dtype)]  # no step counts
    if order.p["scope"] == "bad":
        slots = [v for v in slots if not _is_finite(v)]
    first = _first_slots(run) if slots else {}
    write_all([(variable, first[id(variable)]) for variable in slots])
    return ("done", f"{len(slots)} slots reset") if slots else ("skipped", "no slot is bad")


def _stop(order: Order) -> Answer:
    order.run.model.stop_training = True
    order.run.failed = order.p.get("log_worst_metrics", False)
    return "done", f"training stops; {_ended(order)}"


def _ended(order: Order) -> str:
    """End training; return a description of the final state and learning rates."""
    order.run.stopped, restore = True, order.p.get("restore", True)
    state = restore_for_good(order) if restore else "the state is not restored"
    return "; ".join([state, *_rates_left(order.run, restore)])


def _rates_left(run: Run, restore: bool) -> list[str]:
    """Reset every lowered learning rate, or report that it stays; return a sentence for each."""
    changed = []
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rates.get(id(optimizer))
        if rate is None or rate.factor >= 1:
            continue
        lowered, which = rate.value, f"the learning rate of {optimizer.name}"
        if restore:
            rate.restore(1.0)
            changed.append(f"{which} is reset to {rate.value:.3g} (from {lowered:.3g})")
        else:
            share = f"{rate.factor:.3g} times the configured rate"
            changed.append(f"{which} stays at {lowered:.3g}, {share}")
    if restore:
        run.recovery.returns = None
    return changed


def _call(order: Order) -> Answer:
    name, functions = order.p["function"], order.run.functions
    if name not in functions:
        known = ", ".join(sorted(functions)) or "none"
        return "skipped", f"no function is registered as {name!r} (registered: {known})"
    result = functions[name](order.incident)
    return "done", "" if result is None else str(result)


# Bad batches on disk: plain arrays without pickle, written atomically. A file is named
# `step-00000123.npz`. Its arrays are named `x`, `y` and `sample_weight`, followed by `/name` or
# `/number` if the data are nested. Sparse and ragged tensors are stored by their parts (`x/values`,
# `x/indices`). The entry `incident` has the incident as JSON text.


FOLDER = "quarantine"

_SPARSE, _RAGGED = ("indices", "values", "dense_shape"), ("flat_values", "nested_row_splits")
"""Parts of sparse and ragged tensors."""

_NAMES = ("x", "y", "sample_weight")


def _quarantine(order: Order) -> Answer:
    run, report, incident = order.run, order.report, order.incident
    if run.directory is None:
        return "skipped", "NanGuard has no directory"
    if report is None or report.batch is None:
        return "skipped", "there is no batch to save"
    max_batches, max_mb = order.p["max_batches"], order.p["max_mb"]
    folder = Path(run.directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.sweep(folder)
    kept = sorted(folder.glob("step-*.npz"))
    if len(kept) >= max_batches:
        there = f"{folder} already has {len(kept)} batches"
        return "skipped", f"{there}, and max_batches is {max_batches}"
    arrays = arrays_of(report.batch)
    arrays["incident"] = np.array(incident.to_json())
    size = sum(array.nbytes for array in arrays.values())
    size += sum(path.stat().st_size for path in kept)
    if size > max_mb * 1e6:
        return "skipped", f"{folder} would have {size / 1e6:.3g} MB, and max_mb is {max_mb:g}"
    name, number = f"step-{incident.step:08d}", 1
    path = folder / f"{name}.npz"
    while path.exists():  # an earlier run may have the same step
        number += 1
        path = folder / f"{name}-{number}.npz"
    with atomic_files.beside(path) as unfinished:
        plain_arrays.save_arrays(unfinished, arrays)
    return "done", f"the batch is in {path}"


def arrays_of(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return every array of a batch by its name, in dtypes that NumPy can write without pickle."""
    data = batch[0] if len(batch) == 1 else batch
    is_usual = isinstance(data, (tuple, list)) and len(data) <= len(_NAMES)
    parts = dict(zip(_NAMES, data)) if is_usual else {"x": data}
    leaves = (leaf for name, part in parts.items() for leaf in _leaves(name, part))
    return {path: _plain(value) for path, value in leaves}


def _leaves(path: str, data: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        children = [(str(key), value) for key, value in data.items()]
    elif isinstance(data, (list, tuple)):
        children = [(str(number), value) for number, value in enumerate(data)]
    else:
        too_large = sparse_arrays.has_coordinates(data) and not sparse_arrays.fits(data)
        if hasattr(data, "todense") and not too_large:
            data = data.todense()
        children = []
        if hasattr(data, "flat_values"):
            children = [(name, getattr(data, name)) for name in _RAGGED]
        elif sparse_arrays.is_sparse(data):
            children = list(zip(_SPARSE, map(np.asarray, sparse_arrays.coordinates(data))))
        if not children and data is not None:
            yield path, data
    for name, child in children:
        yield from _leaves(f"{path}/{name}", child)


def _plain(value: Any) -> np.ndarray[Any, Any]:
    array = spread_arrays.as_array(value)
    if array.dtype.kind == "O":  # text, as TensorFlow hands it out
        texts = [
            i.decode("utf-8", "replace") if isinstance(i, bytes) else str(i) for i in array.flat
        ]
        return np.array(texts).reshape(array.shape)
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:  # bfloat16, float8
        return array.astype(np.float32)
    return array


PERFORMERS: dict[str, Performer] = {
    "skip": Performer(
        lambda order: ("done", "the step was skipped; the state did not change"), "nothing"
    ),
    "rollback": Performer(roll_back, "snapshot"),
    "lower_lr": Performer(_lower_lr, "nothing"),
    "clip": Performer(_clip, "nothing"),
    "fix_loss_scale": Performer(_fix_loss_scale, "nothing"),
    "repair": Performer(_repair, "parts"),
    "reset_batchnorm": Performer(_reset_batchnorm, "parts"),
    "recalibrate_batchnorm": Performer(_recalibrate_batchnorm, "estimates"),
    "reset_slots": Performer(_reset_slots, "parts"),
    "quarantine": Performer(_quarantine, "nothing"),
    "warn": Performer(lambda order: ("done", order.p.get("message", "")), "nothing"),
    "stop": Performer(_stop, "nothing"),
    "raise_error": Performer(
        lambda order: ("done", f"NonFiniteError is raised; {_ended(order)}"), "nothing"
    ),
    "call": Performer(_call, "nothing"),
}
"""Each action of `keras_nanguard.actions.ACTIONS`; a test compares both tables."""
