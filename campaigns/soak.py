"""The soak: a million guarded steps with a fault every 997, and hundreds of fits, in one process.

    KERAS_BACKEND=tensorflow python campaigns/soak.py [FORM ...] [--shorter 50]
    python campaigns/soak.py --write campaigns/results/soak.md

Each form runs in a separate process and writes its measurements to `build/soak`; a form that is
complete there is not run again.

    steps       one fit of 100 epochs; nothing is written to disk
    disk        the same with a directory, snapshots on disk and a validation each epoch
    same        500 fits of one model, each with a new guard
    one-guard   500 fits of one model with one guard
    fresh       500 fits, each of a new model
    plain       500 fits, each of a new model, without a guard: the memory of Keras and the backend
    unguarded   the same for one fit: the million steps without a guard and without a fault

Each tenth of a run is compared with the first one: memory, threads, open files, live graphs,
tensors and Python objects, processor time of a step. There must be one incident for each fault, at
its step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from campaigns import pages  # noqa: E402  it is found from here on

if TYPE_CHECKING:
    from keras_nanguard import NanGuard
    from keras_nanguard._recording.recorder import Recorder

PERIOD = 997
"""Each step of this number is bad."""

BATCH, FEATURES = 8, 4

STEPS, EPOCHS = 1_000_000, 100

FITS, STEPS_OF_FIT, BAD_STEP = 500, 24, 9

FAULTS = ("NaN in an input", "Inf in a target", "1e30 in a target")
"""The faults of bad batches, in turn."""

CAUSES = ("input_nonfinite", "target_nonfinite", "input_scale")
"""The expected causes."""

Save = Callable[[dict[str, Any]], None]

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}

FORMS = ("steps", "disk", "unguarded", "same", "one-guard", "fresh", "plain")


def poison(x: Any, y: Any, number: int) -> None:
    """Make a batch bad, with the fault of this number."""
    fault = FAULTS[number % len(FAULTS)]
    if fault == "NaN in an input":
        x[3, 1] = float("nan")
    else:
        y[3, 0] = float("inf") if fault == "Inf in a target" else 1e30


def cycle(seed: int = 0, faults: bool = True) -> tuple[Any, Any]:
    """Return the batches to repeat: one period for each kind of fault, in which the last batch is
    bad.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    x = draw.standard_normal((len(FAULTS) * PERIOD, BATCH, FEATURES)).astype("float32")
    y = x.sum(2, keepdims=True) + draw.standard_normal((*x.shape[:2], 1)).astype("float32")
    for number in range(len(FAULTS) if faults else 0):
        last = (number + 1) * PERIOD - 1
        poison(x[last], y[last], number)
    return x, y


def endless(x: Any, y: Any) -> Any:
    """Repeat these batches without end: a `tf.data` pipeline on TensorFlow, elsewhere a generator.
    """
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    return _repeated(x, y)


def _repeated(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    while True:
        yield from zip(x, y)


def small_model() -> Any:
    """Return a model whose step takes almost no time."""
    import keras

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
    return model


# What is measured


def measured() -> dict[str, int]:
    """Return the resources of this process: bytes of memory, threads, open files, and live objects
    of several kinds.
    """
    gc.collect()
    held = {
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }
    kinds = counted_objects()
    return held | {"objects": kinds["object"]} | graphs(kinds)


def counted_objects() -> Counter[str]:
    """Return the number of Python objects, in all and of some types, counted in a fork because a
    list of them would take megabytes.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: the child only counts
        child = os.fork()
    if child == 0:
        try:
            kinds = Counter(map(_kind, gc.get_objects()))
            os.write(writing, json.dumps({"object": sum(kinds.values()), **{kind: kinds[kind] for kind in KINDS}}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found: Counter[str] = Counter(json.load(pipe))
    os.waitpid(child, 0)
    return found


TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
KINDS = ("FuncGraph", "EagerTensor", *TENSORS, *(f"{kind} with a history" for kind in TENSORS))
"""The types that are counted."""


def _kind(thing: Any) -> str:
    name = type(thing).__name__
    if name not in ("Tensor", "Parameter") or (kind := f"{type(thing).__module__}.{name}") not in TENSORS:
        return name
    return kind + " with a history" if thing.grad_fn is not None else kind


def graphs(kinds: Counter[str]) -> dict[str, int]:
    """Return the numbers of live compiled programs, or graphs, and of tensors."""
    import keras

    if keras.backend.backend() == "tensorflow":
        from tensorflow.python.eager import (
            context,  # the one place that knows the functions of the runtime
        )

        return {"graphs": len(context.context().list_function_names()) + kinds["FuncGraph"], "tensors": kinds["EagerTensor"]}
    if keras.backend.backend() == "jax":
        import jax

        client = jax.local_devices()[0].client
        return {"graphs": len(client.live_executables()), "tensors": len(client.live_arrays())}
    history = sum(kinds[f"{kind} with a history"] for kind in TENSORS)
    return {"graphs": history, "tensors": history + sum(kinds[kind] for kind in TENSORS)}


class Gauge:
    """The measurements of one run, and the processor time of the steps in between.

    Args:
        save: called with all measurements after each one.
    """

    def __init__(self, save: Save):
        self.samples: list[dict[str, Any]] = []
        self._save = save
        self.resume()

    def resume(self) -> None:
        """Start to count time."""
        self._started = time.process_time(), time.perf_counter()

    def note(self, steps: int, so_far: dict[str, Any]) -> None:
        """Measure after this many steps since the last time, and save everything known so far."""
        spent, wall = time.process_time() - self._started[0], time.perf_counter() - self._started[1]
        self.samples.append({**measured(), "processor_us": 1e6 * spent / steps, "wall_us": 1e6 * wall / steps})
        self._save({**so_far, "samples": self.samples})
        self.resume()


def steady(form: str, steps: int, epochs: int, directory: str | None, save: Save) -> None:
    """Run one long fit; with a directory also with all files and a validation in each epoch."""
    import keras

    gauge, model, (x, y) = Gauge(save), small_model(), cycle(faults=form != "unguarded")
    guards = [] if form == "unguarded" else [_guard(directory)]

    class Measures(keras.callbacks.Callback):
        async_safe = True

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            gauge.resume()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            made = (epoch + 1) * (steps // epochs)
            counts = counted(guards[0], directory) if guards else {"steps": made, "faults": 0, "incidents": 0, "wrong": []}
            so_far = {**counts, "finite": all_finite(model), "done": epoch == epochs - 1}
            gauge.note(steps // epochs, so_far)

    validation = {"validation_data": (x[:8].reshape(-1, FEATURES), y[:8].reshape(-1, 1))} if directory else {}
    lengths = {"steps_per_epoch": steps // epochs, "epochs": epochs}
    model.fit(endless(x, y), **lengths, shuffle=False, verbose=0, callbacks=[*guards, Measures()], **validation)


def _guard(directory: str | None) -> NanGuard:
    from keras_nanguard import NanGuard

    return NanGuard(directory=directory, **({"snapshot": {"storage": "disk"}} if directory else {}))


def flush(recorder: Recorder) -> None:
    """Have everything so far written to the file of a recording."""
    writer = recorder._writer
    for _ in range(2 if writer is not None else 0):  # what is being written now, then the rest
        recorder._work(time.time())
        while not writer.ready and not writer.problem:
            time.sleep(0.001)


def counted(guard: NanGuard, directory: str | None) -> dict[str, Any]:
    """Return the number of steps of a long run, and a comparison of its incidents with the faults
    so far.
    """
    from keras_nanguard import Recording

    steps = guard.session.run.step
    made = [(step, True, CAUSES[number % len(CAUSES)]) for number, step in enumerate(range(PERIOD - 1, steps, PERIOD))]
    found = [(incident.step, incident.refused, incident.diagnosis.cause) for incident in guard.incidents]
    result = {"steps": steps, "faults": len(made), "refused": guard.session.run.counts.refused, "incidents": len(found), "wrong": wrong(made, found)}
    if directory:
        files = [file.stat().st_size for file in Path(directory).rglob("*") if file.is_file()]
        flush(guard._log.recorder)
        logged = sum(event.kind == "incident" for event in Recording.read(directory).events)
        result |= {"logged": logged, "disk": sum(files), "disk_files": len(files)}
    return result


def wrong(made: list[Any], found: list[Any]) -> list[str]:
    """Return at most ten differences between the incidents and the faults."""
    were, are = set(made), set(found)
    return [*(f"missing: {one}" for one in made if one not in are), *(f"not made: {one}" for one in found if one not in were)][:10]


def all_finite(model: Any) -> bool:
    """Whether every variable of a model is finite."""
    import keras
    import numpy as np

    return all(bool(np.isfinite(keras.ops.convert_to_numpy(value)).all()) for value in model.variables)


def fits(form: str, number: int, save: Save) -> None:
    """Run this many fits, each with one fault, and measure twenty times."""
    from keras_nanguard import NanGuard

    x, y = cycle()
    x, y = x[:STEPS_OF_FIT].reshape(-1, FEATURES).copy(), y[:STEPS_OF_FIT].reshape(-1, 1).copy()
    bad = slice(BAD_STEP * BATCH, (BAD_STEP + 1) * BATCH)
    gauge, models, incidents, wrongly, every = Gauge(save), [], 0, [], max(number // 20, 1)
    model, one_guard = small_model(), NanGuard(verbose=0)
    for index in range(number):
        if form in ("fresh", "plain"):
            model = small_model()
            models.append(weakref.ref(model))
        guards = [] if form == "plain" else [one_guard if form == "one-guard" else NanGuard(verbose=0)]
        before = x[bad].copy(), y[bad].copy()
        if guards:
            poison(x[bad], y[bad], index)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=guards)
        x[bad], y[bad] = before
        for guard in guards:
            new = guard.incidents[incidents if form == "one-guard" else 0 :]
            incidents += len(new)
            found = [(incident.step, incident.refused, incident.diagnosis.cause) for incident in new]
            wrongly += [f"fit {index + 1}: {text}" for text in wrong([(BAD_STEP, True, CAUSES[index % len(CAUSES)])], found)]
        if (index + 1) % every == 0:
            guards = guard = new = None
            gc.collect()
            so_far = {"fits": index + 1, "steps": (index + 1) * STEPS_OF_FIT, "done": index + 1 == number}
            so_far |= {"faults": 0 if form == "plain" else index + 1, "incidents": incidents, "wrong": wrongly[:10]}
            so_far |= {"finite": all_finite(model), "alive": sum(reference() is not None for reference in models)}
            gauge.note(every * STEPS_OF_FIT, so_far)


def one_thread(backend: str) -> None:
    """Let the backend compute in one thread: tiny steps are faster, and their processor time varies
    less.
    """
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    elif backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)


def run(form: str, shorter: int, save: Save) -> None:
    """Run one form in this process; `shorter` divides its length. Measurements are saved
    repeatedly.
    """
    import keras

    one_thread(keras.backend.backend())
    keras.utils.set_random_seed(0)
    if form not in ("steps", "disk", "unguarded"):
        fits(form, max(FITS // shorter, 20), save)
        return
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        steady(form, STEPS // shorter, max(EPOCHS // shorter, 10), folder if form == "disk" else None, save)


def claims(result: dict[str, Any]) -> dict[str, bool]:
    """Return the claims about a run, and whether each holds."""
    samples = result["samples"]
    tenth = max(len(samples) // 10, 1)
    first, later = samples[tenth - 1], samples[tenth:]
    counted = {"every incident counted, at its step": result["faults"] == result["incidents"] and not result["wrong"]}
    if "logged" in result:
        counted["every incident logged on disk"] = result["logged"] == result["faults"]
    return {
        **counted,
        "every variable finite": result["finite"],
        "memory within 1%": max(sample["memory"] for sample in later) <= 1.01 * first["memory"],
        "no thread": max(sample["threads"] for sample in later) <= first["threads"],
        "no open file": max(sample["files"] for sample in later) <= first["files"],
        "no graph": max(sample["graphs"] for sample in later) <= first["graphs"],
        "no model": result.get("alive", 0) <= 1,
    }


# The page


def tenths(samples: list[dict[str, Any]], name: str) -> list[float]:
    """Return the median of a number in each tenth of a run."""
    tenth = max(len(samples) // 10, 1)
    parts = [samples[start : start + tenth] for start in range(0, tenth * 10, tenth)]
    return [statistics.median(sample[name] for sample in part) for part in parts if part]


def row(result: dict[str, Any]) -> list[str]:
    """Return the cells of one run."""
    samples = result["samples"]
    first, last = samples[max(len(samples) // 10, 1) - 1], samples[-1]
    highest = max(sample["memory"] for sample in samples[len(samples) // 10 :])
    more = f"{100 * (highest / first['memory'] - 1):+.2f}%"
    length = f"{result['fits']:,} fits" if "fits" in result else f"{result['steps']:,} steps"
    counted = f"{result['incidents']:,} of {result['faults']:,}" if result["faults"] else "no guard"
    kinds = ("threads", "files", "graphs", "tensors", "objects")
    held = [f"{first[kind]:,}" if first[kind] == last[kind] else f"{first[kind]:,} -> {last[kind]:,}" for kind in kinds]
    times = " ".join(f"{time:.0f}" for time in tenths(samples, "processor_us"))
    broken = ", ".join(name for name, held in claims(result).items() if not held) or "-"
    length += "" if result["done"] else " so far"
    return [BACKENDS[result["backend"]], result["form"], length, counted, f"{first['memory'] / 1e6:.0f} MB, {more}", *held, times, broken]


HEAD = (
    *("backend", "form", "length", "incidents of faults", "memory after a tenth, at most later", "threads", "open files"),
    *("graphs", "tensors", "Python objects", "processor time of a step by tenths, microseconds", "does not hold"),
)


def table(found: dict[tuple[str, str], dict[str, Any]], earlier: str = "") -> str:
    """Return the results as a table, with the versions; runs without a result keep their earlier
    rows. A soak takes days, so its runs may come from several machines.
    """
    rows = {(cells[0], cells[1]): cells for cells in pages.rows(earlier)}
    rows |= {(BACKENDS[backend], form): row(result) for (backend, form), result in found.items()}
    order = [rows[backend, form] for form in FORMS for backend in BACKENDS.values() if (backend, form) in rows]
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *("| " + " | ".join(cells) + " |" for cells in order)]
    used = {one["versions"] for one in found.values()} | set(re.findall(r"\w+ [\d.]+, Keras [\d.]*\d", earlier))
    kept = [one for one in found.values() if "disk" in one]
    on_disk = [f"{BACKENDS[one['backend']]} {one['disk'] / 1e6:.1f} MB in {one['disk_files']} files" for one in kept]
    return "\n".join([*lines, "", f"{'; '.join(sorted(used))}. On disk at the end: {', '.join(on_disk) or 'nothing'}."])


# The runs


def results(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results so far, by backend and form."""
    found = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    return {(one["backend"], one["form"]): one for one in found}


def run_all(forms: list[str], folder: Path, shorter: int) -> None:
    """Run each form that is not complete, in a separate process."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    folder.mkdir(parents=True, exist_ok=True)
    for form in forms:
        if results(folder).get((backend, form), {}).get("done"):
            continue
        subprocess.run([sys.executable, __file__, "--one", form, "--shorter", str(shorter), "--results", str(folder)], check=True)
        print(backend, form, claims(results(folder)[backend, form]), flush=True)


def run_one(form: str, folder: Path, shorter: int) -> None:
    """Run one form, and write its results to a file during the run."""
    import keras

    backend = keras.backend.backend()
    library = __import__(backend).__version__.partition("+")[0]
    known = {"backend": backend, "form": form, "versions": f"{BACKENDS[backend]} {library}, Keras {keras.__version__}"}

    def save(result: dict[str, Any]) -> None:
        unfinished = folder / f"{backend}-{form}.unfinished"
        unfinished.write_text(json.dumps({**known, **result}), "utf-8")
        unfinished.replace(folder / f"{backend}-{form}.json")

    run(form, shorter, save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", choices=[*FORMS, []], help="forms to run; all by default")
    parser.add_argument("--shorter", type=int, default=1, help="divisor of the numbers of steps and fits")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "soak", help="folder of the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help="write the tables into this page")
    a = parser.parse_args()
    if a.one:
        run_one(a.one, a.results, a.shorter)
    elif a.write:
        pages.write(a.write, "soak", table(results(a.results), pages.read(a.write, "soak")))
    else:
        run_all(a.forms or list(FORMS), a.results, a.shorter)


if __name__ == "__main__":
    main()
