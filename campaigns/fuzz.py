"""Coverage-guided fuzzing of all readers of files: policies, the files of a run, model files.

    python campaigns/fuzz.py --minutes 36 --write campaigns/results/fuzz.md
    python campaigns/fuzz.py --targets npz recording --minutes 2
    python campaigns/fuzz.py --again out/fuzz/npz/findings/error-0c1f.json

Inputs are recipes (`fuzz_recipes`), from which `fuzz_files` creates files, so that mutations reach
the code behind the checks of a header. The first recipes come from files that a run has written
(`fuzz_seeds`). atheris guides the mutation by the coverage of the package. `fuzz_oracles` has the
properties that must hold. Each target is fuzzed in a separate process, which is restarted if an
input ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from campaigns import fuzz_seeds, pages  # noqa: E402
from campaigns.fuzz_folders import emptied, outside  # noqa: E402
from campaigns.fuzz_oracles import Finding, Watch  # noqa: E402
from campaigns.fuzz_recipes import Recipe, crossed, mutated, packed, unpacked, words_of  # noqa: E402
from campaigns.fuzz_runs import warmed_up  # noqa: E402
from campaigns.fuzz_targets import TARGETS, Target, with_command  # noqa: E402
from keras_nanguard._files import isolated  # noqa: E402

MAX_INPUT, MAX_LINES = 1 << 19, 300
"""Maximum bytes of a recipe; number of recipes of a corpus for which lines are counted."""

HANG = 60
"""Seconds after which an input that does not return ends its process."""


class Bench:
    """Runs the inputs of one target, and stores the findings.

    Args:
        target: the target.
        folder: the folder for inputs and findings; the first recipes are in the folder `seeds` next
            to it.
        watch: watches the folder `inputs` in it.
    """

    def __init__(self, target: Target, folder: Path, watch: Watch | None = None):
        self.target, self.folder = target, folder
        self.executions = 0
        self.began = time.monotonic()
        outside(folder / "outside")
        self.watch = watch or Watch(folder / "inputs")
        (folder / "findings").mkdir(exist_ok=True)
        self.seeds = fuzz_seeds.load(folder.parent / "seeds", target.name)
        self.words = sorted({word for recipe in self.seeds for word in words_of(recipe["tree"]) if len(word) < 200})
        warmed_up()
        for recipe in self.seeds:  # everything else that is loaded on first use
            with contextlib.suppress(Exception):
                path = self._written(recipe)
                target.look(path)
        with contextlib.suppress(Exception):
            target.command(self._written(self.seeds[0]))

    def _written(self, recipe: Recipe) -> Path:
        return self.target.write(recipe, emptied(self.folder / "inputs" / "input"))

    def run(self, recipe: Recipe, commands: bool | None = None) -> list[Finding]:
        """Return the findings of a recipe; a recipe from which no file can be created is skipped.
        """
        try:
            path = self._written(recipe)
        except Exception:  # noqa: BLE001 (an invalid tree)
            return []
        size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
        found = self.watch.run(lambda: self.target.look(path), size)
        if with_command(recipe) if commands is None else commands:
            with contextlib.suppress(Exception):
                path = self._written(recipe)
            found += self.watch.run(lambda: self.target.command(path), size)
        self.executions += 1
        if any(finding.oracle == "write" for finding in found):
            outside(self.folder / "outside")
        return found

    def mutated(self, recipe: Recipe | None, number: int) -> Recipe:
        """Return a mutation of a recipe, or of one of the first recipes: the same for the same
        number.
        """
        random = Random(number)
        return mutated(recipe or random.choice(self.seeds), random, self.words, self.target.raw)

    def keep(self, recipe: Recipe, found: Iterable[Finding]) -> None:
        """Write findings to files, with the shortest input of each kind."""
        for finding in found:
            mark = hashlib.sha256(f"{finding.oracle} {finding.where}".encode()).hexdigest()[:8]
            file = self.folder / "findings" / f"{finding.oracle}-{mark}.json"
            text = json.dumps({"target": self.target.name, "finding": str(finding), "recipe": recipe})
            if not file.exists() or len(text) < file.stat().st_size:
                file.write_text(text)

    def note(self) -> None:
        """Write the number of inputs that this process has run."""
        (self.folder / f"executions-{os.getpid()}.json").write_text(json.dumps([self.executions, time.monotonic() - self.began]))


def fuzz(target: Target, folder: Path, seconds: float, seed: int) -> None:
    """Fuzz a target in this process. It does not return."""
    import atheris

    with atheris.instrument_imports(include=["keras_nanguard"]):
        bench = Bench(target, folder)
    isolated.STALL_SECONDS = 5.0
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, recipe in enumerate(bench.seeds):
        (corpus / f"seed-{number}").write_bytes(packed(recipe))

    def one(data: bytes) -> None:
        recipe = unpacked(data)
        if recipe is None:
            return
        bench.keep(recipe, bench.run(recipe))
        if bench.executions % 50 == 1:
            bench.note()

    def mutate(data: bytes, most: int, number: int) -> bytes:
        return _within(packed(bench.mutated(unpacked(data), number)), most, data)

    def cross(data: bytes, other: bytes, most: int, number: int) -> bytes:
        first, second = unpacked(data), unpacked(other)
        return data if first is None or second is None else _within(packed(crossed(first, second, Random(number))), most, data)

    options = (
        f"-max_total_time={int(seconds)}",
        f"-timeout={HANG}",
        "-rss_limit_mb=3000",
        "-report_slow_units=600",
        f"-max_len={MAX_INPUT}",
        f"-seed={seed}",
    )
    arguments = [sys.argv[0], str(corpus), f"-artifact_prefix={folder}/crash-", "-len_control=0", "-verbosity=1", *options]
    bench.began = time.monotonic()
    atheris.Setup(arguments, one, custom_mutator=mutate, custom_crossover=cross)
    atheris.Fuzz()


def _within(made: bytes, most: int, before: bytes) -> bytes:
    return made if len(made) <= most else before[:most]


def lines(target: Target, folder: Path) -> None:
    """Count the lines of the readers that the corpus of a target reaches, and write the numbers."""
    import coverage

    files = [str(path) for path in sorted((ROOT / "keras_nanguard").rglob("*.py")) if _module(path).startswith(target.modules)]
    measured = coverage.Coverage(data_file=None, include=files, config_file=False)
    measured.start()
    bench = Bench(target, folder)
    inputs = sorted((folder / "corpus").iterdir(), key=lambda path: path.stat().st_size)[:MAX_LINES]
    for path in inputs:
        if (recipe := unpacked(path.read_bytes())) is not None:
            bench.run(recipe, commands=False)
    measured.stop()
    there = reached = 0
    for file in files:
        _, statements, _, missing, _ = measured.analysis2(file)
        there, reached = there + len(statements), reached + len(statements) - len(missing)
    (folder / "lines.json").write_text(json.dumps([reached, there, len(inputs)]))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# One process for each target


def fuzzed(target: Target, out: Path, seconds: float, seed: int) -> None:
    """Fuzz a target for this time, in as many processes as necessary; `survived` examines an input
    that ends one.
    """
    folder = out / target.name
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 5:
        log = folder / "log.txt"
        with log.open("a") as file:
            words = ["--child", target.name, "--minutes", str(left / 60), "--out", str(out), "--seed", str(seed)]
            code = subprocess.run([sys.executable, __file__, *words], stdout=file, stderr=file, check=False, cwd=ROOT).returncode
        seed += 1000
        for crash in folder.glob("crash-*"):
            if crash.suffix != ".seen":
                survived(target, folder, crash, code)
    words = ["--lines", target.name, "--out", str(out)]
    subprocess.run([sys.executable, __file__, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, cwd=ROOT)


def survived(target: Target, folder: Path, crash: Path, code: int) -> None:
    """Run an input that ended a process again, alone. If that also ends a process, run it with the
    command line, as users do, which must contain a library that crashes or hangs.
    """
    words = ["--again", str(crash), "--child", target.name, "--out", str(folder.parent)]
    if _comes_back(words):
        word = "slow"  # so was the machine
    else:
        word = "contained" if _comes_back([*words, "--commands"]) else "crash"
    crash.rename(folder / f"{word}-{crash.name.removeprefix('crash-')}.seen")
    print(f"{target.name}: an input ended the process ({code}): {word}", flush=True)


def _comes_back(words: list[str]) -> bool:
    """Whether a process ends without being killed, with or without findings."""
    try:
        return subprocess.run([sys.executable, __file__, *words], capture_output=True, check=False, timeout=300, cwd=ROOT).returncode in (
            0,
            1,
        )
    except subprocess.TimeoutExpired:
        return False


def again(file: Path, out: Path, name: str, commands: bool) -> int:
    """Run one input: that of a finding, or one that ended a process. Findings are stored."""
    content = json.loads(file.read_text())
    name, recipe = name or content["target"], content.get("recipe", content)
    bench = Bench(TARGETS[name], out / name)
    if commands:
        found = bench.watch.run(lambda: bench.target.command(bench._written(recipe)), file.stat().st_size)
    else:
        found = bench.run(recipe, commands="recipe" in content)
    if "recipe" not in content:
        bench.keep(recipe, found)
    print(*(found or ["all holds"]), sep="\n")
    return int(bool(found))


# The table


def table(out: Path, names: Iterable[str]) -> str:
    """Return the table of all targets as Markdown."""
    rows = ["| format | read by | executions | minutes | lines of the readers | open findings |", "|---|---|---|---|---|---|"]
    whole = [0, 0.0, 0]
    for name in names:
        target, folder = TARGETS[name], out / name
        runs = [json.loads(file.read_text()) for file in folder.glob("executions-*.json")]
        executions, seconds = sum(run[0] for run in runs), sum(run[1] for run in runs)
        reached = json.loads((folder / "lines.json").read_text()) if (folder / "lines.json").exists() else [0, 0, 0]
        open_ones = len(list((folder / "findings").glob("*.json"))) + len(list(folder.glob("crash-*")))
        contained = len(list(folder.glob("contained-*")))
        note = f"{open_ones}" + (f"; {contained} times HDF5 crashed or hung in its child process" if contained else "")
        share = f"{reached[0]} of {reached[1]}" if reached[1] else ""
        rows.append(f"| {target.format} | {target.reader} | {executions:,} | {seconds / 60:.1f} | {share} | {note} |")
        whole = [whole[0] + executions, whole[1] + seconds, whole[2] + open_ones]
    rows.append(f"| all | | {whole[0]:,} | {whole[1] / 60:.1f} | | {whole[2]} |")
    return "\n".join([*rows, "", _versions()])


def _versions() -> str:
    names = ("atheris", "numpy", "h5py", "pydantic", "PyYAML", "tensorstore", "keras")
    found = [f"{name} {metadata.version(name)}" for name in names if _installed(name)]
    return f"Made with {', '.join(found)}, Python {platform.python_version()}."


def _installed(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--targets", nargs="*", choices=TARGETS, default=list(TARGETS), metavar="NAME", help=f"of {', '.join(TARGETS)}; all by default"
    )
    parser.add_argument("--minutes", type=float, default=36.0, help="of all targets together, in equal shares")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "fuzz", help="folder for corpora and findings; a run continues from its content"
    )
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--table", action="store_true", help="only write the table of earlier runs")
    parser.add_argument("--again", type=Path, help="run the input of one finding again")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--commands", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lines", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seeds", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.again:
        return again(given.again, given.out, given.child, given.commands)
    if given.child:
        fuzz(TARGETS[given.child], given.out / given.child, 60 * given.minutes, given.seed)
    if given.lines:
        lines(TARGETS[given.lines], given.out / given.lines)
        return 0
    if given.seeds:
        fuzz_seeds.trained(emptied(given.out / "trained"))
        fuzz_seeds.save(given.out / "trained", given.out / "seeds")
        return 0
    return _all(given)


def _all(given: Any) -> int:
    if not (given.out / "seeds").exists():
        subprocess.run([sys.executable, __file__, "--seeds", "--out", str(given.out)], check=True, cwd=ROOT)
    for name in () if given.table else given.targets:
        fuzzed(TARGETS[name], given.out, 60 * given.minutes / len(given.targets), given.seed)
        print(table(given.out, [name]).splitlines()[2], flush=True)
    names = [name for name in TARGETS if (given.out / name).exists()]
    text = table(given.out, names)
    if given.write is not None:
        pages.write(given.write, "fuzz", text)
    print(text)
    found = [file for name in names for file in (given.out / name / "findings").glob("*.json")]
    return int(bool(found) or any(given.out.glob("*/crash-*")))


_Work = Callable[[Path], None]

if __name__ == "__main__":
    raise SystemExit(main())
