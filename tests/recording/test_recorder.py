"""The recorder: exact for the last steps, true to minimum and maximum before that, and never larger than it may be."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
from support import recordings, zoo
from support.calls import calls_of

from keras_nanguard._core.errors import GuardError
from keras_nanguard._recording import layer_table, rows as rows_module
from keras_nanguard._recording.layer_table import LayerTable, by_path
from keras_nanguard._recording.recorder import MAX_EVENTS, Recorder
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import BIN_COLUMNS, COMMITTED, MEASURED, OVERFLOW, REFUSED, SKIPPED, STEP_COLUMNS, BadSample
from keras_nanguard._recording.rows import EXACT, MAX_BINS, Rows

zoo.once()


class Clock:
    """A clock that goes on by so much with each look."""

    def __init__(self, by=0.001):
        self.now, self.by = 1.7e9, by

    def __call__(self):
        self.now += self.by
        return self.now


def recorder(**settings):
    made = Recorder(Clock(**settings))
    made.begin({"model": "net"}, scaled=True, path=None)
    return made


def columns(count, seed=0, start=0):
    """Return columns of steps with everything in them."""
    random = np.random.default_rng(seed)
    found = {name: random.standard_normal(count) for name in MEASURED}
    found["loss"][random.random(count) < 0.05] = np.nan
    found["gradient_norm"][random.random(count) < 0.05] = np.inf
    step = np.arange(start, start + count)
    status = random.choice([COMMITTED, REFUSED, OVERFLOW], count, p=[0.9, 0.07, 0.03])
    place = {"step": step, "epoch": step // 100, "batch": step % 100, "time": step * 0.01}
    return {**found, **place, "status": status, "undone": step % 50 == 7}


class TestRows:
    @pytest.mark.parametrize("total", [0, 1, EXACT, EXACT + 2048, EXACT + 2049, 50_000])
    def test_last_steps_are_exact_and_bins_stand_for_the_others(self, total, monkeypatch):
        """Each bin says of its steps what a look at all of them says; together with the exact ones they are all steps."""
        monkeypatch.setattr(rows_module, "MAX_BINS", 64)
        whole, rows = columns(total), Rows()
        for start in range(0, total, 777):
            rows.extend({name: column[start : start + 777] for name, column in whole.items()})
        exact, bins = rows.steps(), rows.bins
        for name in STEP_COLUMNS:
            np.testing.assert_array_equal(exact[name], whole[name][rows.first :].astype(STEP_COLUMNS[name]), err_msg=name)
        assert len(exact["step"]) >= min(total, EXACT) and rows.end == total and len(bins["first"]) < 64
        assert bins["count"].sum() == rows.first
        np.testing.assert_array_equal(np.r_[0, np.cumsum(bins["count"])[:-1]], bins["first"]) if len(bins["first"]) else None
        for number, (first, last) in enumerate(zip(bins["first"], bins["last"])):
            part = {name: column[first : last + 1] for name, column in whole.items()}
            assert bins["refused"][number] == (part["status"] == REFUSED).sum()
            assert bins["overflows"][number] == (part["status"] == OVERFLOW).sum() and bins["undone"][number] == part["undone"].sum()
            for name in MEASURED:
                finite = part[name][np.isfinite(part[name])]
                assert (bins[f"{name}_min"][number], bins[f"{name}_max"][number]) == (finite.min(), finite.max())

    def test_undone(self):
        """A rollback marks committed steps from its snapshot on, those of the refused ones that are run again, and nothing else."""
        rows = Rows()
        status = np.array([COMMITTED, REFUSED, COMMITTED, OVERFLOW, COMMITTED, SKIPPED])
        rows.extend({"step": np.arange(6), "status": status})
        rows.changed = rows.end
        rows.undo(1, frozenset({3}))
        assert rows.steps()["undone"].tolist() == [False, False, True, True, True, False] and rows.changed == 2
        rows.undo(0)
        assert rows.steps()["undone"].tolist() == [True, False, True, True, True, False] and rows.changed == 0

    def test_undone_in_bins(self):
        """Bins after the snapshot count all of their committed steps as undone, those before it none."""
        rows = Rows()
        rows.extend({"step": np.arange(EXACT + 3000), "status": np.zeros(EXACT + 3000)})
        rows.changed_bin = len(rows.bins["first"])
        rows.undo(300)
        bins = rows.bins
        assert rows.changed_bin == 1 and bins["undone"][:3].tolist() == [0, 212, 256]
        assert bins["undone"].sum() + rows.steps()["undone"].sum() == EXACT + 3000 - 300


class TestRecorder:
    def test_what_a_step_measures(self):
        """Loss, gradient norm without the loss scale, place in the epoch, time, status."""
        made = recorder()
        for step in range(6):
            if step % 3 == 0:
                made.place(step, step // 3, step)
            made.push(step, 1.0 / (step + 1), 2.0 * 8.0**2, 8.0, REFUSED if step == 4 else COMMITTED)
        steps = made.recording.steps
        assert steps["step"].tolist() == list(range(6)) and steps["epoch"].tolist() == [0, 0, 0, 1, 1, 1]
        assert steps["batch"].tolist() == [0, 1, 2, 0, 1, 2] and steps["status"].tolist() == [0, 0, 0, 0, 1, 0]
        np.testing.assert_allclose(steps["loss"], [1.0 / (n + 1) for n in range(6)])
        np.testing.assert_allclose(steps["gradient_norm"], 2.0)
        np.testing.assert_allclose(steps["loss_scale"], 8.0)
        assert np.all(np.diff(steps["time"]) > 0) and steps["step"].dtype == np.int64

    def test_rate_is_known_where_it_was_seen(self):
        """Between two looks that see the same rate it is that one; where they see two, what lies between is not known."""
        made = recorder()

        def look(rate, **how):
            made.rate(rate, **how)

        made.place(0, 0, 0)
        for step in range(12):
            made.push(step, 1.0, 1.0, 1.0)
            if step == 1:
                look(0.5)  # the first look of an epoch: nobody changes a rate before
            if step == 4:
                look(0.5)
            if step == 5:
                look(0.25, ahead=True)  # lowered by the guard: from the next step on
            if step == 8:
                look(0.25)
            if step == 11:
                look(0.1)
        rates = made.recording.steps["learning_rate"]
        np.testing.assert_array_equal(rates, [0.5] * 5 + [np.nan] + [0.25] * 3 + [np.nan] * 2 + [0.1])

    def test_fits_follow_one_another(self):
        """Steps are counted on from fit to fit, and the event of each says where it began."""
        made = recorder()
        for step in range(5):
            made.push(step, 1.0, 1.0, 1.0)
        made.end("finished", 5, 0)
        made.begin({"model": "net"}, scaled=False, path=None)
        made.push(0, 1.0, 1.0, 1.0)
        recording = made.recording
        assert recording.steps["step"].tolist() == list(range(6)) and math.isnan(recording.steps["loss_scale"][-1])
        assert [(e.kind, e.step) for e in recording.events] == [("begin", 0), ("end", 5), ("begin", 5)]
        assert recording.meta["status"] == "running" and recording.events[2].data["base"] == 5

    def test_memory_is_constant(self):
        """A hundred thousand steps, 30,000 incidents and as many bad samples as are kept take no more than 16 MB."""
        incident = recordings.incident(5, 0, 5)
        made, resumed = recorder(), Recorder(Clock())
        gc.collect()
        tracemalloc.start()
        try:
            made, peak = recorder(), 0
            for block in range(250):
                for step in range(block * 400, block * 400 + 400):
                    made.push(step, 1.0, 1.0, 1.0)
                for number in range(120):
                    made.event("incident", number, 0, incident=incident)
                made.event("snapshot", block, 0)
                for number in range(block * 40, block * 40 + 40):
                    mark = f"{number:064x}"
                    if len(made.samples) < 4096:
                        made.sample(BadSample(f"x[{number}]", number, mark, 16, tuple(range(block, block + 16)), "3 NaN of 64 in x"))
                peak = max(peak, tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert peak < 16e6 and len(made._major) == MAX_EVENTS
        assert len(made._rows.bins["first"]) <= MAX_BINS and not resumed.samples

    def test_recording_of_a_million_steps_holds_them_all(self, monkeypatch):
        """The number of steps and of refused ones is exact, however many there were."""
        rows = Rows()
        whole = columns(1_000_000)
        rows.extend(whole)
        steps, bins = rows.steps(), rows.bins
        assert bins["count"].sum() + len(steps["step"]) == 1_000_000 and len(bins["count"]) < MAX_BINS
        assert bins["refused"].sum() + (steps["status"] == REFUSED).sum() == (whole["status"] == REFUSED).sum()
        recording = Recording({}, steps, bins)
        step, low, high = recording.series("loss", 500)
        assert len(step) <= 500 and np.all(np.diff(step) > 0)
        assert (low.min(), high.max()) == (np.nanmin(whole["loss"]), np.nanmax(whole["loss"]))

    def test_a_step_appends_and_does_nothing_else(self):
        """In the hot path the clock is read and one row appended; what that takes is in benchmarks/recorder.py."""
        made = recorder()
        made.push(0, 1.0, 1.0, 1.0)
        for step in range(1, 500):
            assert calls_of(made.push, step, 1.0, 1.0, 1.0) == ["push", "__call__", "append", "len"]

    @pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
    def test_copies(self, how):
        """A copy has what was recorded so far, and goes its own way."""
        made = recorder()
        made.push(0, 1.0, 1.0, 1.0)
        other = how(made)
        assert len(other.recording) == len(made.recording) == 1
        other.push(1, 1.0, 1.0, 1.0)
        assert (len(other.recording), len(made.recording)) == (2, 1)

    def test_no_step_waits_for_a_recording(self):
        """The texts of incidents, of which there may be thousands, are made while steps go on."""
        made, waited = recorder(), []

        class Slow:
            def to_dict(self):
                thread = threading.Thread(target=made.event, args=("snapshot", 1, 0))
                thread.start()
                thread.join(60.0)
                waited.append(thread.is_alive())
                return {}

        made.event("incident", 0, 0, incident=Slow())
        assert len(made.recording.events) == 2 and waited == [False]

    def test_a_recording_is_a_copy(self):
        """What a recording holds does not change while the run goes on."""
        made = recorder()
        made.push(0, 1.0, 1.0, 1.0)
        before = made.recording
        made.push(1, 2.0, 1.0, 1.0)
        made.undo(0)
        assert len(before) == 1 and not before.steps["undone"][0] and len(made.recording) == 2

    def test_memory_of_layers(self, monkeypatch):
        """All of it counts, and the paths, which come anew with each moment, are kept once; those of an earlier process, too."""
        monkeypatch.setattr(layer_table, "MAX_BYTES", 200_000)
        table, variables = LayerTable(), [f"a/long/path/of/variable_{n}" for n in range(10)]
        gc.collect()
        tracemalloc.start()
        try:
            for step in range(2000):
                table.add(step, tuple((str(path.encode(), "ascii"), "trainable") for path in variables), np.zeros((10, 3)))
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert 100_000 < held < 250_000 and len(by_path(table.rows())) == 10
        table.restore([(step, str(b"a/path", "ascii"), str(b"trainable", "ascii"), 0.0, 0.0, 0.0) for step in range(9)])
        assert len({id(row[1]) for row in table.rows()[:9]}) == len({id(row[2]) for row in table.rows()[:9]}) == 1


class TestRecording:
    def test_series_of_all_steps_together(self):
        """Bins and steps come in growing order of steps; what is not finite is left out; points are limits from below and above."""
        recording = recordings.synthetic(30_000, 20)
        for name in MEASURED:
            step, low, high = recording.series(name, 100)
            assert 0 < len(step) <= 100 and np.all(np.diff(step) > 0) and np.all(low <= high) and np.isfinite([low, high]).all()
        assert recording.series("loss")[2].max() == np.nanmax(recording.bins["loss_max"])
        assert [len(part) for part in Recording().series("loss")] == [0, 0, 0]

    @pytest.mark.parametrize(("call", "says"), [(("los",), "name to be one of"), (("loss", 0), "points to be at least 1")])
    def test_series_of_nothing(self, call, says):
        """A wrong name and a wrong number of points are errors."""
        with pytest.raises(GuardError, match=says):
            recordings.synthetic(10).series(*call)

    @pytest.mark.parametrize("library", ["pandas", "polars"])
    def test_frames(self, library):
        """Each table becomes a frame with the same columns and rows, where the library is installed."""
        pytest.importorskip(library)
        recording = recordings.synthetic(20_000, 5)
        for table, columns_ in (("steps", STEP_COLUMNS), ("bins", BIN_COLUMNS), ("events", None), ("samples", None)):
            frame = getattr(recording, f"to_{library}")(table)
            rows = getattr(recording, table)
            assert len(frame) == (len(next(iter(rows.values()))) if columns_ else len(rows))
            assert columns_ is None or list(frame.columns) == list(columns_)
        with pytest.raises(GuardError, match="table to be one of"):
            getattr(recording, f"to_{library}")("stepz")

    def test_frames_without_the_library(self, monkeypatch):
        """Where it is not installed, the error says what to install."""
        monkeypatch.setitem(__import__("sys").modules, "pandas", None)
        with pytest.raises(GuardError, match="pip install pandas"):
            recordings.synthetic(10).to_pandas()
