"""The cost of a guard against depth, width, batch size and number of processes.

    KERAS_BACKEND=tensorflow python campaigns/scale.py [AXIS ...]
    python campaigns/scale.py --write campaigns/results/scale.md

A plain and a guarded fit run in one process, one epoch each in turn. The first step (trace,
compile, first snapshot) and later ones are compared in processor time; the peak of memory is
measured in separate processes. Results are saved to `build/scale`, and a point with a result is not
measured again.

    depth       layers of 8 units
    width       parameters, in one kernel
    batch       rows of a batch, an MLP of 13,000 parameters
    processes   processes on this machine that share each batch of 64 rows, an MLP of 200,000
                parameters: JAX with `DataParallel`, PyTorch with `DistributedDataParallel` and a
                hand-written loop under `guard.watch`

The optimizer is SGD without momentum, for which the relative cost of a guard is highest.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from campaigns import pages  # noqa: E402  it is found from here on
from campaigns.soak import BACKENDS, one_thread  # noqa: E402

POINTS: dict[str, tuple[int, ...]] = {
    "depth": (4, 8, 16, 32, 64, 128, 256, 512),
    "width": (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
    "batch": (1, 16, 256, 4096),
    "processes": (1, 2, 4),
}

PEAKS = {"depth": (4, 64, 512), "width": (1_000_000, 10_000_000, 100_000_000)}
"""The points whose memory is measured, in a separate process for each variant."""

PICTURE = ROOT / "docs" / "pictures" / "scale.svg"

VARIANTS = ("plain", "guarded")

ROUNDS = 7


class Work(NamedTuple):
    """A compiled model, one batch, and the number of steps of a round."""

    model: Any
    batch: tuple[Any, Any]
    steps: int


def work(axis: str, size: int) -> Work:
    """Return the model of one point, its batch, and the number of steps of a round."""
    import keras
    import numpy as np

    features, hidden, rows, steps = 8, (8,) * size, 8, max(200 // size, 4)
    if axis == "width":
        features = round(size**0.5)
        hidden, steps = (features,), {10_000: 50, 100_000: 50, 1_000_000: 20}.get(size, 4)
    elif axis == "batch":
        features, hidden, rows, steps = 64, (64,) * 3, size, 50 if size < 1000 else 20
    elif axis == "processes":
        features, hidden, rows, steps = 256, (256,) * 3, 64 // size, 20
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, "relu") for units in hidden]
    model = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-7), "mse")  # at which no width diverges, because healthy runs are measured
    draw = np.random.default_rng(0)
    return Work(model, (draw.standard_normal((rows, features), np.float32), draw.standard_normal((rows, 1), np.float32)), steps)


def guards(variant: str, every: int) -> list[Any]:
    """Return the guard of a variant, which takes a snapshot after this many steps."""
    from keras_nanguard import NanGuard

    return [NanGuard(verbose=0, snapshot={"every": every})] if variant == "guarded" else []


class Trainer:
    """Runs one long fit in a separate thread, one epoch at a time; between two epochs nothing runs.

    Attributes:
        steps: number of steps of an epoch.
    """

    def __init__(self, variant: str, work: Work):
        import keras

        self._go, self._at_gate, self.steps, self._over = threading.Semaphore(0), threading.Semaphore(0), work.steps, False
        trainer, backend = self, keras.backend.backend()

        class Gate(keras.callbacks.Callback):
            async_safe = True

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                trainer._at_gate.release()
                trainer._go.acquire()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = trainer._over

        def train() -> None:
            if backend == "torch":
                one_thread(backend)  # PyTorch sets it for each thread separately
            lengths = {"steps_per_epoch": work.steps, "epochs": 10**6}
            work.model.fit(endless(work.batch), **lengths, shuffle=False, verbose=0, callbacks=[*guards(variant, 100), Gate()])

        self._spent, start = 0.0, time.process_time()
        self.thread = threading.Thread(target=train, daemon=True)
        self.thread.start()
        self._wait()
        self._spent = time.process_time() - start

    def epoch(self) -> float:
        """Return the processor time of the next epoch, in seconds; that of the first includes the
        preparations of `fit`.
        """
        start = time.process_time()
        self._go.release()
        self._wait()
        before, self._spent = self._spent, 0.0
        return before + time.process_time() - start

    def _wait(self) -> None:
        while not self._at_gate.acquire(timeout=5):
            if not self.thread.is_alive():
                sys.exit("a fit has ended by an exception, see above")

    def end(self) -> None:
        """End the fit."""
        self._over = True
        self._go.release()
        self.thread.join()


def endless(batch: tuple[Any, Any]) -> Any:
    """Yield this batch without end."""
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensors(batch).repeat()
    return (batch for _ in itertools.repeat(None))


def timed(make: Callable[[], Work], rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the processor time of the first step and of later ones of each variant, and the ratio of later ones by round."""
    trainers, first, later = {}, {}, {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        trainers[variant] = Trainer(variant, make())
        first[variant] = trainers[variant].epoch()
        trainers[variant].epoch()  # Keras on TensorFlow traces its function a second time here
    for number in range(rounds):
        for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
            later[variant].append(trainers[variant].epoch() / trainers[variant].steps)
    steps = trainers["plain"].steps
    for trainer in trainers.values():
        trainer.end()
    middle = {variant: min(times) for variant, times in later.items()}  # other work on the machine only adds to it
    return {
        "first": {variant: first[variant] - (steps - 1) * middle[variant] for variant in VARIANTS},
        "later": middle,
        "ratios": sorted(guarded / plain for guarded, plain in zip(later["guarded"], later["plain"])),
    }


# Memory, each variant in a separate process


def peak(axis: str, size: int, variant: str) -> int:
    """Return how far the peak memory of this process has risen since before it had a model, in
    bytes.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * page
    what = work(axis, size)
    what.model.fit(endless(what.batch), steps_per_epoch=12, shuffle=False, verbose=0, callbacks=guards(variant, 4))
    highest = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(highest.split()[1]) * 1024 - before


def peaks(axis: str, size: int) -> dict[str, int]:
    """Return the peak of each variant, in bytes."""
    found = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--peak", axis, str(size), variant]
        found[variant] = int(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()[-1])
    return found


# Several processes


def spread(size: int) -> dict[str, Any]:
    """Return the times of this many processes that train together, measured by the first one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    commands = [[sys.executable, __file__, "--rank", place, str(size), str(rank)] for rank in range(size)]
    others = [subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL) for command in commands[1:]]
    printed = subprocess.run(commands[0], env=settings, stdout=subprocess.PIPE, check=True, text=True).stdout
    if sum(process.wait() != 0 for process in others):
        sys.exit("a process has ended by an exception, see above")
    return dict(json.loads(printed.splitlines()[-1]))


def one_of(place: str, size: int, rank: int) -> dict[str, Any]:
    """Join the other processes, and measure with them."""
    import keras

    if keras.backend.backend() == "torch":
        return loops(place, size, rank)
    if size > 1:
        keras.distribution.initialize(job_addresses=place, num_processes=size, process_id=rank)
        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False))
    return timed(lambda: work("processes", size))


def loops(place: str, size: int, rank: int) -> dict[str, Any]:
    """Return the times of `DistributedDataParallel`, plain and guarded, one epoch each in turn."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    from keras_nanguard import NanGuard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://{place}", world_size=size, rank=rank)
    x, y = work("processes", size).batch
    rows, targets, steps = torch.from_numpy(x), torch.from_numpy(y), 50

    def trained(watch: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        torch.manual_seed(0)
        hidden = [layer for _ in range(3) for layer in (nn.Linear(x.shape[1], x.shape[1]), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(x.shape[1], 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)

        def step() -> Any:
            optimizer.zero_grad()
            loss = (model(rows) - targets).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if not watch:
            return step, lambda: None
        guard = NanGuard(verbose=0, snapshot={"every": 100})
        watching = guard.watch(model, optimizer)
        watching.__enter__()
        return guard.step(step), lambda: watching.__exit__(None, None, None)

    def seconds(step: Callable[[], Any], count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            step()
        return (time.process_time() - start) / count

    made = {variant: trained(variant == "guarded") for variant in VARIANTS}
    first = {variant: seconds(step, 1) for variant, (step, _) in made.items()}
    later: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(ROUNDS):
        for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
            later[variant].append(seconds(made[variant][0], steps))
    for _, end in made.values():
        end()
    distributed.barrier()
    distributed.destroy_process_group()
    rounds = sorted(guarded / plain for guarded, plain in zip(later["guarded"], later["plain"]))
    return {"first": first, "later": {variant: min(times) for variant, times in later.items()}, "ratios": rounds}


# The page


def ratios(point: dict[str, Any]) -> dict[str, float]:
    """Return the time of a guarded step as a multiple of a plain one: of the first step, and of
    later ones.
    """
    return {moment: point[moment]["guarded"] / point[moment]["plain"] for moment in ("first", "later")}


def table(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the results as a table."""
    head = ["", "backend", "first step, plain", "guarded", "ratio", "later steps, plain", "guarded", "ratio", "ratio by rounds", "memory"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for axis, backend in itertools.product(POINTS, BACKENDS):
        points = found.get((backend, axis), {}).get("points", {})
        for size in sorted(points, key=int):
            lines.append("| " + " | ".join([f"{axis} {int(size):,}", BACKENDS[backend], *cells(points[size])]) + " |")
    return "\n".join([*lines, "", "; ".join(sorted({one["versions"] for one in found.values()})) + "."])


def cells(point: dict[str, Any]) -> list[str]:
    """Return the measurements of one point, as text."""
    ratio, rounds = ratios(point), point["ratios"]
    quartiles = f"{rounds[len(rounds) // 4]:.2f} to {rounds[-1 - len(rounds) // 4]:.2f}"
    first = [f"{point['first'][variant]:.2f} s" for variant in VARIANTS]
    later = [f"{1e3 * point['later'][variant]:.2f} ms" for variant in VARIANTS]
    more = f"{(point['peak']['guarded'] - point['peak']['plain']) / 1e6:.0f} MB" if "peak" in point else ""
    return [*first, f"{ratio['first']:.2f}", *later, f"{ratio['later']:.2f}", quartiles, more]


def plot(found: dict[tuple[str, str], dict[str, Any]], path: Path) -> None:
    """Draw the ratios against the size, by axis and backend."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scale"
    import matplotlib.pyplot as plt

    axes = [axis for axis in POINTS if any((backend, axis) in found for backend in BACKENDS)]
    figure, panels = plt.subplots(2, len(axes), figsize=(3.4 * len(axes), 5), sharey="row", squeeze=False, layout="constrained")
    for (column, axis), (line, moment) in itertools.product(enumerate(axes), enumerate(("first", "later"))):
        panel = panels[line][column]
        for backend, name in BACKENDS.items():
            points = found.get((backend, axis), {}).get("points", {})
            sizes = sorted(map(int, points))
            panel.plot(sizes, [ratios(points[str(size)])[moment] for size in sizes], marker="o", markersize=3, label=name)
        names = {"depth": "layers", "width": "parameters", "batch": "rows of a batch"}
        panel.set(xscale="linear" if axis == "processes" else "log", xlabel=names.get(axis, axis))
        panel.axhline(1.0, color="0.7", linewidth=0.8, zorder=0)
    for line, moment in enumerate(("first step", "later steps")):
        panels[line][0].set_ylabel(f"{moment}, guarded / plain")
        panels[line][0].set_ylim(bottom=0.0)  # of the whole row, after all of its lines
    panels[0][0].legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None})


# The runs


def results(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results so far, by backend and axis."""
    found = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    return {(one["backend"], one["axis"]): one for one in found}


def run(axis: str, sizes: list[int], folder: Path, measure: Callable[[str, int], dict[str, Any]]) -> None:
    """Measure the points of one axis that have no result yet, and save each."""
    import keras

    backend = keras.backend.backend()
    folder.mkdir(parents=True, exist_ok=True)
    versions = f"{BACKENDS[backend]} {__import__(backend).__version__.partition('+')[0]}, Keras {keras.__version__}"
    known = results(folder).get((backend, axis), {"backend": backend, "axis": axis, "points": {}})
    for size in sizes:
        if str(size) not in known["points"]:
            known["points"][str(size)] = measure(axis, size)
            (folder / f"{backend}-{axis}.json").write_text(json.dumps({**known, "versions": versions}), "utf-8")
            print(backend, axis, size, known["points"][str(size)], flush=True)


def measured(axis: str, size: int) -> dict[str, Any]:
    """Return all measurements of one point."""
    if axis == "processes":
        return spread(size)
    found = timed(lambda: work(axis, size))
    gc.collect()
    return found | ({"peak": peaks(axis, size)} if size in PEAKS.get(axis, ()) else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", help=f"of {', '.join(POINTS)}; all by default")
    parser.add_argument("--sizes", type=int, nargs="*", help="points of the axis; all by default")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "scale", help="folder of the results")
    parser.add_argument("--write", type=Path, help="write table and plot into this page")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if a.write:
        found = results(a.results)
        plot(found, PICTURE)
        pages.write(a.write, "scale", table(found))
        return
    if a.rank:
        print(json.dumps(one_of(a.rank[0], *map(int, a.rank[1:]))))
        return
    one_thread(backend)
    if a.peak:
        print(peak(a.peak[0], int(a.peak[1]), a.peak[2]))
        return
    timed(lambda: work("depth", 4), 1)  # the first point would pay for what all share
    for axis in a.axes or [axis for axis in POINTS if axis != "processes" or backend != "tensorflow"]:
        run(axis, a.sizes or list(POINTS[axis]), a.results, measured)


if __name__ == "__main__":
    main()
