"""The page of a run: content, independence of other files, escaped names, files it reads."""

import base64
import hashlib
import json
import re
import shlex
import zipfile
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import keras
import numpy as np
import pytest
from support.command_line import main
from support.recordings import HOSTILE, incidents_of, run_of, synthetic, written

import keras_nanguard
from keras_nanguard import Diagnosis, Finding, Incident, Recording
from keras_nanguard._core.literals import CAUSES
from keras_nanguard._files import bundles
from keras_nanguard._recording.database import OVERFLOW, STEP_COLUMNS
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import Event, incidents as recorded
from keras_nanguard._report import cards, compare, html
from keras_nanguard._report.cards import MAX_CARDS, snippet
from keras_nanguard._report.reported_run import ReportedRun

pytestmark = pytest.mark.requires_backend("torch", reason="needs no backend: runs once")

PAGE = Path(keras_nanguard.__file__).parent / "_report" / "page"


class Elements(HTMLParser):
    """The elements of a page, their attributes, and the text outside of styles and scripts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text, self._raw, self.raw = [], [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._raw = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._raw = ""

    def handle_data(self, data):
        (self.raw if self._raw else self.text).append(data)


def page_of(recording):
    return html.page(run_of(recording))


def data_of(page):
    """Return the data of the script of a page: strict JSON."""
    raw = next(r for r in Elements(page).raw if r.startswith('{"charts"'))
    return json.loads(raw, parse_constant=pytest.fail)


def test_contents():
    recording = synthetic(1500, 6)
    text = " ".join(Elements(page_of(recording)).text)
    causes = ("input_nonfinite", "loss_domain", "log(0) in the loss.")
    for words in (*causes, "np.isfinite", "replay runs/net/bundles", "x[217]", "3.15.1", "# recover"):
        assert words in text, words
    assert "rolled back" not in text


def test_a_healthy_run():
    text = " ".join(Elements(page_of(synthetic(300, 0))).text)
    assert "every step was finite" in text and "Bad rows" not in text
    assert "There are no incidents." in " ".join(Elements(html.page(ReportedRun())).text), "there may be no recording at all"


def test_before_the_first_step():
    text = " ".join(Elements(html.page(ReportedRun((), Recorder().recording))).text)
    assert "No step has run yet." in text and "running" not in text and "every step was finite" not in text


NAMES = [
    *(HOSTILE, "</script x", "<!--<script ", "{{ 7 * 7 }}", "</style><b>", "\u2028-->", "\ud800"),
    *("' onmouseover='alert(1)", '"><svg onload=alert(1)>'),
]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names(name):
    """The same elements as with a harmless name, which appears as text; all can be encoded."""
    one, other = (Elements(page_of(synthetic(600, 8, name=called))) for called in (name, "net"))
    assert [tag for tag, _ in one.found] == [tag for tag, _ in other.found]
    assert [sorted(attributes) for _, attributes in one.found] == [sorted(attributes) for _, attributes in other.found]
    data = page_of(synthetic(600, 8, name=name)).split('id="data">')[1].split("</script>")[0]
    assert len(data) > 1000 and not set(data) & set("<>&\u2028\u2029"), "browsers end a script at more than its end tag"
    assert name in "".join(one.text) and "49" not in [t.strip() for t in one.text]
    one, other = (Elements(compare.page([ReportedRun((), synthetic(600, 8, name=called), name=called)])) for called in (name, "net"))
    assert [tag for tag, _ in one.found] == [tag for tag, _ in other.found] and name in "".join(one.text)


def test_it_needs_nothing_else():
    """No element loads another file, and the content security policy forbids it."""
    found = Elements(page_of(synthetic(600, 4))).found
    links = [a[key] for _, a in found for key in ("src", "href", "action", "data", "poster") if key in a]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert any(a.get("http-equiv") == "Content-Security-Policy" and "default-src 'none'" in a["content"] for _, a in found)
    assert not re.search(r"@import|url\(", (PAGE / "report.css").read_text() + (PAGE / "uPlot.min.css").read_text())


def test_the_data_of_the_script():
    """It is JSON, without NaN; each incident has its step and its card."""
    recording = synthetic(600, 9)
    data = data_of(page_of(recording))
    steps, numbers, _ = data["marks"]["incidents"]
    assert steps == [i.step + 1 for i in incidents_of(recording)] and set(numbers) == {0, 1, 2, 3}
    loss = next(chart for chart in data["charts"] if chart["name"] == "loss")
    assert loss["x"][0] == 1 and loss["log"] is False and len(loss["x"]) == len(loss["low"]) == len(loss["high"])


def test_steps_count_as_in_the_recording():
    """Incidents of a second fit count from its start; on the timeline from the recording's."""
    recording = synthetic(600, 4)
    later = [replace(event, step=event.step + 7) for event in recording.events]
    marks = data_of(page_of(replace(recording, events=tuple(later))))["marks"]
    assert marks["incidents"][0] == [i.step + 8 for i in incidents_of(recording)]


def test_a_log_that_is_ahead_of_the_recording():
    """Incidents in the recording have its steps; those only in the log are of the running fit."""
    recording = synthetic(600, 4)
    incidents = incidents_of(recording)
    moved = [replace(event, step=event.step + 1000) for event in recording.events if event.step <= incidents[-2].step]
    behind = replace(recording, meta={**recording.meta, "base": 1000}, events=tuple(moved))
    assert len(incidents_of(behind)) == 3
    marks = data_of(html.page(ReportedRun(incidents, behind)))["marks"]
    assert marks["incidents"][0] == [i.step + 1001 for i in incidents]


def test_undone_values_have_a_separate_curve():
    back, again = 40, 10
    count = back + again
    columns = {name: np.zeros(count, dtype) for name, dtype in STEP_COLUMNS.items()}
    columns["step"] = np.r_[np.arange(back), np.arange(back - again, back)]
    columns["loss"] = np.r_[np.full(back, 9.0), np.full(again, 2.0)]
    columns["undone"][back - again : back] = True
    chart = html._chart(Recording(steps=columns), "loss")
    assert chart["x"] == list(range(1, back + 1))
    assert chart["high"] == chart["low"] == [9.0] * (back - again) + [2.0] * again
    assert chart["undone"] == [None] * (back - again) + [9.0] * again
    columns["undone"][:] = False
    columns["step"] = np.arange(count)
    assert "undone" not in html._chart(Recording(steps=columns), "loss")


@pytest.mark.parametrize("status", [1, 2], ids=["refused", "overflow"])
def test_a_refused_step_of_an_abandoned_run(status):
    """Its values are drawn with the undone steps, because no step with its number was replayed."""
    columns = {name: values.copy() for name, values in synthetic(8, 0).steps.items()}
    columns["step"][:] = [0, 1, 2, 3, 0, 2, 3, 4]
    columns["loss"][:] = [9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    columns["status"][1], columns["undone"][[0, 2, 3]] = status, True
    chart = html._chart(Recording(steps=columns), "loss")
    assert chart["high"] == [1.0, None, 1.0, 1.0, 1.0] and chart["undone"] == [9.0] * 4 + [None]
    columns["step"][:] = [0, 1, 2, 3, 1, 2, 3, 4]  # the snapshot was taken right before it
    columns["undone"][:4] = [False, True, True, True]
    chart = html._chart(Recording(steps=columns), "loss")
    assert chart["high"] == [9.0, 1.0, 1.0, 1.0, 1.0] and chart["undone"] == [None, 9.0, 9.0, 9.0, None]


def test_incidents_that_the_recording_has_dropped():
    """Incidents besides those of the recording do not move these, and count as of the last fit."""
    recording = synthetic(300, 3)
    events = [replace(e, data={**e.data, "step": e.data["step"] - 40}) if e.kind == "incident" else e for e in recording.events]
    recording = replace(recording, events=tuple(events), meta={**recording.meta, "base": 200})
    known = recorded(recording)
    other = replace(known[0][0], step=5)
    shown, steps = html._placed(ReportedRun([other, *(i for i, _ in known)], recording))
    assert [i.step for i in shown.incidents] == [5, *(i.step for i, _ in known)]
    assert steps == [205, *(step for _, step in known)]
    shown, steps = html._placed(ReportedRun([other]))
    assert shown.incidents == [other] and steps == [5]


def test_undone_values_in_a_long_run():
    """If a curve has fewer points than steps, both courses use the same ones, without holes."""
    recording = synthetic(8000, 0)
    recording.steps["undone"][3000:5000] = True
    chart = html._chart(recording, "loss")
    kept, undone = ([n for n, value in enumerate(chart[name]) if value is not None] for name in ("high", "undone"))
    assert len(chart["x"]) == html.POINTS and sorted({*kept, *undone}) == list(range(html.POINTS))
    assert undone == list(range(750, 1250)) and kept == [*range(750), *range(1250, 2000)]


def test_skipped_steps_that_were_run_again_are_counted():
    recording = synthetic(600, 0)
    recording.meta.update(run_again=6)
    assert "<dt>skipped and run again</dt><dd>6</dd>" in page_of(recording)


def test_overflows_are_marked():
    """Each has a mark, and the legend counts them."""
    recording = synthetic(30_000, 0)
    recording.steps["status"][[3, 800, 29_000]] = OVERFLOW
    recording.meta.update(refused=3, overflows=3)
    marks = data_of(page_of(recording))["marks"]
    assert "every step was finite" not in page_of(recording) and "ordinary float16 overflows" in page_of(recording)
    assert marks["overflow_count"] == 3 and marks["overflows"] == [4, 801, 29_001]


def test_a_directory_that_several_fits_share():
    """All fits of the recording: incidents, and rollbacks counted from their own fit."""
    first = synthetic(600, 4)
    begin, back = Event(600, 0, 2e9, "begin", "", {"base": 600}), Event(650, 0, 2e9 + 1, "rollback", "back", {"to": 40, "undone": 10})
    foreign = Event(700, 0, 2e9 + 2, "incident", "", {"format": 99})
    both = replace(first, events=(*first.events, begin, back, replace(first.events[1], step=660), foreign))
    marks = data_of(html.page(ReportedRun(incidents_of(first)[:2], both)))["marks"]
    assert marks["incidents"][0] == [*(i.step + 1 for i in incidents_of(first)), 661] and marks["rollbacks"][-1] == [641, 651, "back"]


def test_a_long_list_of_actions_has_the_last_ones():
    """The number of earlier ones is said; of a short list none is missing."""
    events = [Event(n, 0, 1e9 + n, "learning_rate", f"change {n}") for n in range(250)]
    events.append(Event(250, 0, 2e9, "rollback", "back to the start"))
    text = " ".join(Elements(page_of(replace(synthetic(300, 0), events=tuple(events)))).text)
    assert "back to the start" in text and "change 51 " in text and "change 50 " not in text
    assert "number of earlier ones: 51." in text
    text = " ".join(Elements(page_of(replace(synthetic(300, 0), events=tuple(events[51:])))).text)
    assert "change 51 " in text and "earlier ones" not in text


def test_the_command_can_be_pasted():
    """The shell takes any folder name as one argument."""
    name = "runs/a b; rm -rf $HOME"
    (found,) = cards.cards(ReportedRun([Incident(3, 0, 3, (), bundle=name)]), [3])
    assert shlex.split(found.replay) == ["keras-nanguard", "replay", name]


def test_many_kinds_have_one_card_in_common():
    many = [Incident(n, 0, n, (), diagnosis=Diagnosis("spike", f"layer_{n}")) for n in range(MAX_CARDS + 50)]
    found = cards.cards(ReportedRun(many), range(len(many)))
    assert len(found) == MAX_CARDS + 1 and found[-1].title.startswith("50 more kinds") and len(found[-1].kind.incidents) == 50


def test_the_cards_of_several_fits_are_in_order_of_time():
    """Each fit counts its steps from 0; the recording counts those of all fits."""
    first, second = (Incident(n, 0, n, (), diagnosis=Diagnosis("spike", f"layer_{n}")) for n in (50, 3))
    assert [card.first for card in cards.cards(ReportedRun([first, second]), [50, 103])] == [first, second]


def test_the_card_in_common_is_in_order_of_time():
    """Its first incident is the earliest, not one of the most frequent kind."""
    names = ["early", *[f"layer_{n}" for n in range(MAX_CARDS)] * 3, "late", "late"]
    many = [Incident(n, 0, n, (), diagnosis=Diagnosis("spike", name)) for n, name in enumerate(names)]
    common = cards.cards(ReportedRun(many), range(len(many)))[-1]
    assert common.first is many[0] and list(common.kind.steps) == [0, len(many) - 2, len(many) - 1]


def test_code_to_paste():
    """Each piece of code is valid Python, and uses only identifiers from the data."""
    for cause in CAUSES:
        for culprit in ("inputs/age", "inputs/a'; import os", ""):
            code = snippet(Diagnosis(cause, culprit))
            assert "import os" not in code
            compile(code.replace("loss(..., ", "loss("), cause, "exec")
    assert "isfinite(age)" in snippet(Diagnosis("input_nonfinite", "inputs/age"))
    for name in ("age b", "class"):
        assert "isfinite(x)" in snippet(Diagnosis("input_nonfinite", f"inputs/{name}"))


OPTIMIZERS = {
    "adam": lambda: "adam",
    "a schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
    "clipnorm": lambda: keras.optimizers.Adam(1e-3, clipnorm=1.0),
    "a loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
    "no epsilon": lambda: keras.optimizers.Ftrl(1e-3),
}


@pytest.mark.daily("*-adam-float32", "divergence-*-float32", "*-a loss scale-mixed_float16")
@pytest.mark.parametrize("precision", ("float32", "mixed_float16"))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cause", ("divergence", "spike", "float16_underflow", "optimizer_domain"))
def test_code_that_rebuilds_the_optimizer_runs(cause, name, precision):
    """It needs only the model, and keeps class, loss and schedule where it does not change them."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(OPTIMIZERS[name](), "mse")
        old = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        exec(snippet(Diagnosis(cause)), {"keras": keras, "model": model})
    finally:
        keras.config.set_dtype_policy(before)
    new = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert type(new) is type(old) and model.loss == "mse"
    rate, new_rate = (float(keras.ops.convert_to_numpy(optimizer.learning_rate)) for optimizer in (old, new))
    assert new_rate == pytest.approx(rate / 10 if cause == "divergence" else rate)
    assert new.global_clipnorm == (1.0 if cause in ("divergence", "spike") else old.global_clipnorm)


def save_batch(folder, *arrays):
    """Write inputs and, if there are two arrays, targets as the batch of a bundle."""
    np.savez(folder / "batch.npz", **{str(n): array for n, array in enumerate(arrays)})
    about = {"batch": {"tuple": [{"tuple": list(range(len(arrays)))}]}, "dtypes": [a.dtype.name for a in arrays]}
    (folder / "bundle.json").write_text(json.dumps(about))


HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846,), }"
HEADERS = {
    "no header": b"no array",
    "a header without end": b"\x93NUMPY\x01\x00\x10\x00{'descr': (     \n",
    "more than memory": b"\x93NUMPY\x01\x00\x76\x00" + HUGE.ljust(117) + b"\n",
}
"""Members of an archive that are no array, have a broken header, or exceed the free memory."""


class TestBlamedRows:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "incidents" / "incident-1"
        folder.mkdir(parents=True)
        return folder

    def test_pictures(self, folder):
        """An image is a PNG of its own pixels, with NaN and Inf in magenta."""
        x = np.linspace(0, 1, 3 * 8 * 8).reshape(3, 8, 8, 1).astype("float32")
        x[1, 2, 3] = np.nan
        save_batch(folder, x, np.zeros(3, int))
        (found,) = cards.batch_rows(folder, [1])
        png = base64.b64decode(found.picture.partition(",")[2])
        start = png.index(b"IDAT")
        lines = np.frombuffer(zlib.decompress(png[start + 4 :]), np.uint8).reshape(8, 25)
        pixels = lines[:, 1:].reshape(8, 8, 3)
        assert png.startswith(b"\x89PNG") and pixels[2, 3].tolist() == [255, 0, 200] and (pixels[..., 0] != 255).sum() == 63

    @pytest.mark.parametrize(("shape", "is_image"), [((7, 5), False), ((28, 28), True), ((8, 8, 3), True)])
    def test_a_series_is_not_a_picture(self, folder, shape, is_image):
        x = np.ones((3, *shape), "float32")
        x[1, 2, 3] = np.nan
        save_batch(folder, x)
        (found,) = cards.batch_rows(folder, [1])
        assert bool(found.picture) == is_image and bool(found.columns) != is_image

    def test_columns(self, folder):
        """Rows are a table, unusual columns first, next to their range in other rows."""
        x = np.tile(np.arange(6.0), (5, 1)) + np.arange(5)[:, None] / 10
        x[2, 4], x[2, 1] = np.inf, 900.0
        save_batch(folder, x)
        (found,) = cards.batch_rows(folder, [2, 77])
        assert found.picture == "" and [c[0] for c in found.columns[:2]] == [1, 4]
        assert found.columns[0] == pytest.approx((1, 900.0, 1.0, 1.4, True)) and found.columns[2][4] is False

    def test_of_several_arrays_the_one_to_blame(self, folder):
        """The one that is bad in that row, else of the diagnosis, by its name; also bfloat16."""
        image, age, weight = np.zeros((3, 8, 8, 1), "float32"), np.zeros((3, 2), "float32"), np.ones((3, 1), "float32")
        age[1, 0], weight[2] = np.nan, np.inf
        bits = (weight.view("uint32") >> 16).astype("uint16")
        np.savez(folder / "batch.npz", **{"0": image, "1": age, "2": bits, "3": np.zeros(3, "float32")})
        about = {"batch": {"tuple": [{"tuple": [{"list": [0, 1, 2]}, 3]}]}, "dtypes": ["float32", "float32", "bfloat16", "float32"]}
        (folder / "bundle.json").write_text(json.dumps(about))
        assert [(f.row, f.of) for f in cards.batch_rows(folder, [0, 1, 2, -1])] == [(0, "x/0"), (1, "x/1"), (2, "x/2")]
        about["inputs"] = ["image", "age", ""]
        (folder / "bundle.json").write_text(json.dumps(about))
        assert [f.of for f in cards.batch_rows(folder, [0, 1, 2], "inputs/age")] == ["x/age", "x/age", "x/2"]
        assert cards.batch_rows(folder, [2])[0].columns[0].value == np.inf and cards.batch_rows(folder, [0])[0].picture
        blamed = Incident(1, 0, 1, (), diagnosis=Diagnosis("input_nonfinite", "", (1,)), bundle="incident-1")
        (found,) = cards.cards(ReportedRun([blamed], directory=folder.parents[1]), [1])
        assert found.rows[0].of == "x/age"

    @pytest.mark.parametrize("reported", ["{", "[]", '{"batch": 7, "dtypes": []}', '{"batch": {"tuple": 5}, "dtypes": 3}', "[" * 9999])
    def test_the_description_of_arrays_in_a_bundle_may_be_damaged(self, folder, reported):
        save_batch(folder, np.ones((3, 2)))
        (folder / "bundle.json").write_text(reported)
        assert cards.batch_rows(folder, [0]) == []

    def test_arrays_next_to_an_omitted_one_are_shown(self, folder):
        save_batch(folder, np.ones((3, 2)))
        about = {"batch": {"tuple": [{"tuple": [{"dict": {"a": 0, "b": {"left_out": "object"}}}]}]}, "dtypes": ["float64"]}
        (folder / "bundle.json").write_text(json.dumps(about))
        assert [f.of for f in cards.batch_rows(folder, [0])] == ["x/a"]

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 9, "objects", "flat", *HEADERS])
    def test_unreadable_parts_are_omitted(self, folder, content):
        save_batch(folder, np.ones((3, 2)))
        if isinstance(content, bytes):
            (folder / "batch.npz").write_bytes(content)
        elif content in HEADERS:
            with zipfile.ZipFile(folder / "batch.npz", "w") as archive:
                archive.writestr("0.npy", HEADERS[content])
        else:
            np.savez(folder / "batch.npz", **{"0": np.array([{}]) if content == "objects" else np.zeros(3)})
        assert cards.batch_rows(folder, [0]) == []

    def test_objects_are_never_unpickled(self, folder, tmp_path):
        class Trap:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "sprung",))

        save_batch(folder, np.array([[Trap()]], dtype=object))
        assert cards.batch_rows(folder, [0]) == [] and not (tmp_path / "sprung").exists()

    def test_only_the_directory_of_the_run_is_read(self, folder, tmp_path):
        """A bundle is read from the run's directory by its last name, for any path."""
        (tmp_path / "secret").mkdir()
        assert bundles.bundle_folder("/elsewhere/incident-1", tmp_path) == folder
        assert bundles.bundle_folder(str(tmp_path / "secret"), tmp_path) is None
        assert bundles.bundle_folder("..", tmp_path / "incidents" / "incident-1") is None
        (tmp_path / "incidents" / "link").symlink_to(tmp_path / "secret")
        assert bundles.bundle_folder("link", tmp_path) is None


def test_uplot_equals_the_published_file():
    """The library in the folder is uPlot 1.6.32 as published on npm, with its licence."""
    digests = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert {name: hashlib.sha256((PAGE / name).read_bytes()).hexdigest() for name in digests} == digests
    assert "MIT" in (PAGE / "uPlot.LICENSE").read_text()


class TestSeveralRuns:
    RUNS = (("a", 4, 1), ("b", 8, 2), ("c", 0, 3))

    def seen(self):
        found = []
        for name, count, seed in self.RUNS:
            recording = synthetic(400, count, seed=seed)
            if not count:
                recording.steps["learning_rate"][:] = 1e-5
            found.append(run_of(recording, name=name))
        return found

    def test_common_properties(self):
        """Causes with affected runs, differences of failed ones, rows to blame in several."""
        reported = compare.common(self.seen())
        assert reported[0] == "2 of 3 runs had incidents." and any("in 2 of them, first between step" in line for line in reported)
        assert "The highest learning rate was at least 0.001 in these runs, at most 1e-05 in others." in reported
        assert any("x[217]" in line for line in reported)
        assert compare.common([ReportedRun(name="a")]) == ["0 of 1 run had incidents."]

    def test_the_last_loss_is_of_the_last_step(self):
        """Not the lowest of the last steps, and of steps without a finite loss none."""
        recording = synthetic(1200, 0)
        recording.steps["loss"][:] = np.where(np.arange(1200) < 1191, 0.1, 50.0)
        assert compare.row(run_of(recording))["loss"] == "50"
        recording.steps["loss"][1195:] = np.nan
        recording.steps["loss"][1194] = 40.0
        assert compare.row(run_of(recording))["loss"] == "40"
        assert compare.row(ReportedRun(name="a"))["loss"] == ""

    def test_a_curve_of_the_largest_losses(self):
        """Their difference overflows float64; the path has only numbers."""
        recording = synthetic(3, 0)
        recording.steps["loss"][:] = [-1.7e308, 0.0, 1.7e308]
        assert compare._spark(run_of(recording)) == "M1.0 32.0L80.0 17.0L159.0 2.0"

    def test_words_of_a_single_incident(self):
        """One incident, before the first step or at a step, is said in the singular and at one step."""
        before = Incident(0, 0, 0, (Finding("state"),), refused=False)
        said = compare.text([ReportedRun([before], name="a"), ReportedRun(name="b")])
        assert "steps unknown, 1 incident (first: before the first step): 1 x nonfinite state" in said
        seen = [run_of(synthetic(400, 1, seed=seed), name=name) for name, seed in (("a", 0), ("b", 1))]
        assert any(line.endswith(f"first at step {seen[0].incidents[0].step + 1}.") for line in compare.common(seen))
        page = html.page(ReportedRun([before]))
        assert "first: before the first step" in " ".join(Elements(page).text)

    def test_command(self, tmp_path, capsys):
        for name, count, _ in self.RUNS:
            (tmp_path / name).mkdir()
            written(tmp_path / name, synthetic(400, count))
        paths = [str(tmp_path / name) for name, *_ in self.RUNS]
        assert main(["report", *paths]) == 1
        assert "2 of 3 runs" in capsys.readouterr().out
        assert main(["report", *paths, "--json"]) == 1
        assert [json.loads(line)["incidents"] for line in capsys.readouterr().out.splitlines()] == [4, 8, 0]
        assert main(["report", *paths, "-o", str(tmp_path / "all.html")]) == 1
        assert "2 of 3 runs" in (tmp_path / "all.html").read_text()
        assert main(["report", *paths, "-o", str(tmp_path / "all.txt")]) == 2
        (tmp_path / "notes.txt").write_text("not a run")
        capsys.readouterr()
        assert main(["report", *paths, str(tmp_path / "notes.txt")]) == 1
        reported = capsys.readouterr()
        assert "2 of 3 runs" in reported.out and "skipped" in reported.err and "notes.txt" in reported.err
        assert main(["report", str(tmp_path / "notes.txt"), str(tmp_path / "none")]) == 2
        assert main(["report", paths[2], "-o", str(tmp_path / "one.html")]) == 0
