"""The recorder: exact for the last steps, with the right minimum and maximum for earlier ones, and
limited in size.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import recordings, zoo
from support.recordings import (
    COMMITTED,
    EXACT,
    MEASURED,
    OVERFLOW,
    REFUSED,
    Recorder,
)

from keras_nanguard import GuardError, Recording

zoo.once()


class Clock:
    """A clock that advances by this much at each reading."""

    def __init__(self, by=0.001):
        self.now, self.by = 1.7e9, by

    def __call__(self):
        self.now += self.by
        return self.now


def recorder(**settings):
    made = Recorder(Clock(**settings))
    made.begin({"model": "net"}, scaled=True, path=None)
    return made


def pushed(made, count, seed=0):
    """Push steps with all kinds of values, and return their columns."""
    random = np.random.default_rng(seed)
    loss, squares = random.standard_normal(count), random.random(count)
    loss[random.random(count) < 0.05] = np.nan
    squares[random.random(count) < 0.05] = np.inf
    status = random.choice([COMMITTED, REFUSED, OVERFLOW], count, p=[0.9, 0.07, 0.03])
    for step in range(count):
        made.push(step, loss[step], squares[step], 1.0, int(status[step]))
    return {"step": np.arange(count), "loss": loss, "gradient_norm": np.sqrt(2 * squares), "status": status}


class TestSteps:
    @pytest.mark.parametrize("total", [0, 1, EXACT, EXACT + 2048, EXACT + 2049, 50_000])
    def test_last_steps_are_exact_and_bins_summarize_the_others(self, total, set_limit):
        """Each bin summarizes exactly its steps; bins and exact steps together are all steps."""
        set_limit("bins of a recording", 64)
        made = recorder()
        whole = pushed(made, total)
        steps, bins = made.recording.steps, made.recording.bins
        first = total - len(steps["step"])
        for name, column in whole.items():
            np.testing.assert_array_equal(steps[name], column[first:], err_msg=name)
        assert len(steps["step"]) >= min(total, EXACT) and len(bins["first"]) < 64
        assert bins["count"].sum() == first
        assert bins["first"].tolist() == [0, *np.cumsum(bins["count"]).tolist()][:-1]
        for number, (start, last) in enumerate(zip(bins["first"], bins["last"])):
            part = {name: column[start : last + 1] for name, column in whole.items()}
            assert bins["refused"][number] == (part["status"] == REFUSED).sum()
            assert bins["overflows"][number] == (part["status"] == OVERFLOW).sum()
            for name in ("loss", "gradient_norm"):
                finite = part[name][np.isfinite(part[name])]
                limits = bins[f"{name}_min"][number], bins[f"{name}_max"][number]
                assert limits == (finite.min(), finite.max())
            mean = np.nanmean(part["loss"])
            assert bins["loss_mean"][number] == pytest.approx(mean, abs=1e-2)

    def test_undone_in_bins(self):
        """Bins after the snapshot count all of their committed steps as undone, earlier bins none.
        """
        made = recorder()
        for step in range(EXACT + 3000):
            made.push(step, 1.0, 1.0, 1.0)
        made.undo(300)
        bins, steps = made.recording.bins, made.recording.steps
        assert bins["undone"][:3].tolist() == [0, 212, 256]
        assert bins["undone"].sum() + steps["undone"].sum() == EXACT + 3000 - 300


    def test_skipped_batches_are_not_steps(self):
        """They count neither one by one nor in bins."""
        made, total = recorder(), EXACT + 3000
        for step in range(total):
            if step % 8 == 0:
                made.skip(step, 0, step)
            made.push(step, 1.0, 1.0, 1.0)
        found = made.recording
        assert len(found) == total and len(found.bins["count"]) > 0
        assert (found.bins["count"] <= found.bins["last"] - found.bins["first"] + 1).all()
        made.undo(0)
        assert made.recording.bins["undone"].tolist() == found.bins["count"].tolist()


class TestRecorder:

    def test_rate_is_known_between_equal_readings(self):
        """Between two equal readings the rate is known; between two different ones it is not."""
        made = recorder()

        def look(rate, **how):
            made.rate(rate, **how)

        made.place(0, 0, 0)
        for step in range(12):
            made.push(step, 1.0, 1.0, 1.0)
            if step == 1:
                look(0.5)  # the first reading of an epoch: no rate changes before it
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

    def test_memory_is_limited(self):
        """A hundred thousand steps, 30,000 incidents and many layers take no more than 16 MB."""
        incident = recordings.incident(5, 0, 5)
        text, data, made = str(incident), incident.to_dict(), recorder()
        variables = [(f"a/long/path/of/variable_{n}", "trainable") for n in range(100)]
        for block in range(250):
            for step in range(block * 400, block * 400 + 400):
                made.push(step, 1.0, 1.0, 1.0)
            for number in range(120):
                made.event("incident", number, 0, text, data)
            made.event("snapshot", block, 0)
            made.layers(block * 400, variables, np.ones((100, 2)))
        query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        assert made._memory.connection.execute(query).fetchone()[0] < 16e6
        found = made.recording
        assert len(found) == 100_000 and found.events[-1].kind == "snapshot"
        assert sum(event.kind == "incident" for event in found.events) > 1000

    def test_a_recording_is_a_copy(self):
        """The contents of a recording do not change during the run."""
        made = recorder()
        made.push(0, 1.0, 1.0, 1.0)
        before = made.recording
        made.push(1, 2.0, 1.0, 1.0)
        made.undo(0)
        assert len(before) == 1 and not before.steps["undone"][0] and len(made.recording) == 2


class TestRecording:
    def test_series_of_all_steps_together(self):
        """Bins and steps are in ascending order; values that are not finite are omitted; points
        have a lower and an upper value.
        """
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

    @pytest.mark.parametrize("table", ["steps", "bins"])
    def test_frames(self, table):
        """A table becomes a data frame with the same columns and values."""
        pandas = pytest.importorskip("pandas")
        columns = getattr(recordings.synthetic(20_000, 5), table)
        frame = pandas.DataFrame(columns)
        assert list(frame.columns) == list(columns) and len(frame) > 0
        for name, values in columns.items():
            np.testing.assert_array_equal(frame[name].to_numpy(), values)
