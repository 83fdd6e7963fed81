"""The recorder: complete at the end, every second good step before, limited in size."""

import tracemalloc

import numpy as np
import pytest
from support import limits, recordings
from support.recordings import (
    COMMITTED,
    MEASURED,
    OVERFLOW,
    REFUSED,
    Recorder,
    run_of,
)

from keras_nanguard import GuardError, Recording

pytestmark = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")


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


def pushed(made, count, bad, seed=0):
    random = np.random.default_rng(seed)
    loss, squares = random.standard_normal(count), random.random(count)
    loss[random.random(count) < 0.05] = np.nan
    squares[random.random(count) < 0.05] = np.inf
    status = random.choice([COMMITTED, REFUSED, OVERFLOW], count, p=[1 - bad, 0.7 * bad, 0.3 * bad])
    for step in range(count):
        made.push(step, loss[step], squares[step], 1.0, int(status[step]))
    return {"step": np.arange(count), "loss": loss, "gradient_norm": np.sqrt(2 * squares), "status": status}


MAX_STEPS = limits.limit("steps of a recording")


class TestSteps:
    @pytest.mark.parametrize("total", [0, 1, MAX_STEPS, MAX_STEPS + 1, 3 * MAX_STEPS])
    @pytest.mark.parametrize("bad", [0.01, 0.9])
    def test_every_second_of_the_older_good_steps_is_removed(self, total, bad):
        """Kept ones have their values, the last quarter is complete, few bad steps all stay."""
        made = recorder()
        whole = pushed(made, total, bad=bad)
        steps = made.recording.steps
        kept = steps["step"]
        assert len(kept) <= MAX_STEPS and np.all(np.diff(kept) > 0)
        assert len(kept) == total or len(kept) > MAX_STEPS // 2
        for name, column in whole.items():
            np.testing.assert_array_equal(steps[name], column[kept], err_msg=name)
        assert kept[-(MAX_STEPS // 4) :].tolist() == list(range(total))[-(MAX_STEPS // 4) :]
        if bad < 0.5:
            assert set(np.flatnonzero(whole["status"] != COMMITTED)) <= set(kept.tolist())
        bad, overflows = (int(np.isin(whole["status"], which).sum()) for which in ([REFUSED, OVERFLOW], OVERFLOW))
        assert run_of(made.recording).totals == (total or None, bad, overflows, 0)

    def test_undone_steps_are_removed_like_others(self):
        made = recorder()
        for step in range(MAX_STEPS + 3000):
            made.push(step, 1.0, 1.0, 1.0)
        made.undo(300)
        steps = made.recording.steps
        np.testing.assert_array_equal(steps["undone"], steps["step"] >= 300)


class TestRecorder:

    def test_rate_is_known_between_equal_readings(self):
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

    def test_a_rate_that_stays_nan_has_not_changed(self):
        made = recorder()
        made.push(0, 1.0, 1.0, 1.0)
        assert [str(made.rate(rate)) for rate in (0.5, np.nan, np.nan, 0.5)] == ["None", "0.5", "None", "nan"]

    def test_memory_is_limited(self):
        """A hundred thousand steps and 30,000 incidents take no more than 16 MB at any time."""
        incident = recordings.incident(5, 0, 5)
        tracemalloc.start()
        text, data, made = str(incident), incident.to_dict(), recorder()
        for block in range(250):
            for step in range(block * 400, block * 400 + 400):
                made.push(step, 1.0, 1.0, 1.0)
            for number in range(120):
                made.event("incident", number, 0, text, data)
            made.event("snapshot", block, 0)
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert largest < 16e6
        found = made.recording
        assert len(found) > MAX_STEPS // 2 and found.events[-1].kind == "snapshot"
        assert sum(event.kind == "incident" for event in found.events) > 1000

    def test_a_recording_is_a_copy(self):
        made = recorder()
        made.push(0, 1.0, 1.0, 1.0)
        before = made.recording
        made.push(1, 2.0, 1.0, 1.0)
        made.undo(0)
        assert len(before) == 1 and not before.steps["undone"][0] and len(made.recording) == 2


@pytest.mark.daily("[0-5]")
@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_of_steps_are_those_of_a_list_of_them(seed, tmp_path):
    """Over random steps, rollbacks, fits and restarts, each of which may lose the last steps."""
    random, rows, base = np.random.default_rng(seed), [], 0  # of rows: step, status, undone

    def undo(first, again):
        for row in rows:
            row[2] |= row[0] >= first and (row[1] == COMMITTED or row[0] in again)

    for process in range(random.integers(1, 4)):
        made = Recorder(Clock())
        for fit in range(random.integers(1, 3)):
            end = max((step for step, _, _ in rows), default=-1) + 1
            resumed = int(random.integers(end - base + 1)) if process and not fit and random.random() < 0.7 else None
            made.begin({}, scaled=False, path=tmp_path / "recording.sqlite", resumed=resumed)
            base = end if resumed is None else base + resumed
            undo(base, range(base, end))
            step = 0
            for _ in range(random.integers(13)):
                if random.random() < 0.75 or not step:
                    rows.append([base + step, int(random.choice([COMMITTED, COMMITTED, REFUSED, OVERFLOW])), False])
                    made.push(step, 1.0, 1.0, 1.0, rows[-1][1])
                    step += 1
                else:
                    to, whole = int(random.integers(step + 1)), step
                    again = [n for n in range(to, whole) if random.random() < 0.5]
                    made.undo(to, frozenset(again))
                    undo(base + to, [base + n for n in again])
                    step = to if random.random() < 0.5 else step
            made.end("finished", step, 0)
    found = Recording.read(tmp_path)
    assert [*zip(*(found.steps[name].tolist() for name in ("step", "status", "undone")))] == [*map(tuple, rows)]
    refused = [(status, undone) for _, status, undone in rows if status != COMMITTED]
    lost = sum(undone for _, undone in refused)
    overflows = sum(status == OVERFLOW and not undone for status, undone in refused)
    assert run_of(found).totals[1:] == (len(refused) - lost, overflows, lost)



class TestRecording:
    def test_series_of_all_steps_together(self):
        """Ascending, without values that are not finite; points have a lower and an upper value."""
        recording = recordings.synthetic(30_000, 20)
        for name in MEASURED:
            step, low, high = recording.series(name, 100)
            assert 0 < len(step) <= 100 and np.all(np.diff(step) > 0) and np.all(low <= high) and np.isfinite([low, high]).all()
        assert recording.series("loss")[2].max() == np.nanmax(recording.steps["loss"])
        assert [len(part) for part in Recording().series("loss")] == [0, 0, 0]

    @pytest.mark.parametrize(("call", "says"), [(("los",), "name to be one of"), (("loss", 0), "points to be at least 1")])
    def test_series_of_nothing(self, call, says):
        with pytest.raises(GuardError, match=says):
            recordings.synthetic(10).series(*call)

    def test_frames(self):
        """The steps become a data frame with the same columns and values."""
        pandas = pytest.importorskip("pandas")
        columns = recordings.synthetic(20_000, 5).steps
        frame = pandas.DataFrame(columns)
        assert list(frame.columns) == list(columns) and len(frame) > 0
        for name, values in columns.items():
            np.testing.assert_array_equal(frame[name].to_numpy(), values)
