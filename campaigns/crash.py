"""Training that is killed at random moments, or whose disk fails, ends with the same bits.

    KERAS_BACKEND=torch python campaigns/crash.py kills [50] [seed]
    KERAS_BACKEND=torch python campaigns/crash.py faults
    python campaigns/crash.py write

A life is a training process, forked from this one, which has imported Keras and its backend but has
not run an operation. It resumes from the directory, and is killed with SIGKILL at a random moment
of its expected duration; the next one continues. A run is complete when a life ends without a kill.
Results are appended to `campaigns/crash.jsonl`; kills that are recorded there are not repeated.
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

if __package__ is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import pages
from campaigns.crash_faults import faults
from campaigns.crash_life import (
    BATCHES,
    PHASES,
    append,
    ended,
    forked,
    live,
    never_killed,
    records,
    same,
    versions,
)
from keras_nanguard._fit.resume import find

PAGE = Path(__file__).resolve().parents[1] / "campaigns/results/crash.md"

def killed_runs(kills: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a record of each kill and of each completed run, until this number of kills."""
    whole, length = never_killed(folder)
    backend, draw = keras.backend.backend(), random.Random(seed)
    made = number = 0
    while made < kills:
        number += 1
        directory, result = folder / f"run-{seed}-{number}", folder / f"run-{seed}-{number}.npz"
        lives, last, phases = 0, (0, 0), Counter[str]()
        while not result.exists():
            phase = mmap.mmap(-1, 1)
            pause = draw.choice((0.0, 0.002, 0.01))
            log = folder / f"run-{seed}-{number}.log"
            begin = time.monotonic()
            pid = forked(functools.partial(live, directory, result, phase, pause), log)
            moment = draw.uniform(0.0, 1.25) * length if made < kills else 1e9
            while (left := begin + moment - time.monotonic()) > 0 and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                time.sleep(min(left, 0.05))
            os.kill(pid, signal.SIGKILL)
            code = ended(pid)
            if code not in (0, -signal.SIGKILL):
                raise SystemExit(f"A life failed:\n{log.read_text()}")
            lives += 1
            if code:
                made += 1
                phases[PHASES[phase[0]]] += 1
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    found = find(directory, BATCHES)
                at = (0, 0) if found is None else (found.epoch, found.batch)
                yield {
                    "kind": "kill", "backend": backend, "seed": seed, "run": number, "phase": PHASES[phase[0]], "at": at,
                    "back": at < last, "broken": len(caught), "seconds": time.monotonic() - begin,
                }  # fmt: skip
                last = at
            else:
                length = (length + min(time.monotonic() - begin, 2 * length)) / 2 if lives == 1 else length
        resumed = log.read_text().count("resuming from")
        end = {"kind": "end", "backend": backend, "seed": seed, "run": number, "lives": lives, "resumed": resumed}
        yield {**end, "same": same(whole, result)}
        shutil.rmtree(directory, ignore_errors=True)


def kills(count: int, seed: int) -> None:
    """Kill runs, and append the results to the log."""
    known = sum(r["kind"] == "kill" and r["backend"] == keras.backend.backend() and r["seed"] != seed for r in records())
    with tempfile.TemporaryDirectory() as folder:
        for record in killed_runs(count - known, seed, Path(folder)):
            append({**record, "versions": versions()})


def write() -> None:
    """Write the tables of the page."""
    known = records()
    head = "| backend | kills | while | completed runs | lives of a run | with the same bits | newest snapshot lost by a kill |"
    lines = [head, "|---" * 7 + "|"]
    for backend in ("tensorflow", "jax", "torch"):
        kills = [r for r in known if r["kind"] == "kill" and r["backend"] == backend]
        ends = [r for r in known if r["kind"] == "end" and r["backend"] == backend]
        if not kills:
            continue
        phases = Counter(r["phase"] for r in kills)
        shown = ", ".join(f"{phase} {phases[phase]}" for phase in PHASES if phases[phase])
        lives = f"{min(r['lives'] for r in ends)} to {max(r['lives'] for r in ends)}" if ends else "-"
        equal = sum(r["same"] for r in ends)
        lines.append(f"| {backend} | {len(kills)} | {shown} | {len(ends)} | {lives} | {equal} | {sum(r['back'] for r in kills)} |")
    seeds = sorted({r["seed"] for r in known if "seed" in r})
    used = "; ".join(sorted({r["versions"] for r in known}))
    pages.write(PAGE, "kills", "\n".join(lines) + f"\n\nSeeds {', '.join(map(str, seeds))}. {used}.")
    pages.write(PAGE, "faults", _table_of_faults([r for r in known if r["kind"] == "fault"]))


def _table_of_faults(found: list[dict[str, Any]]) -> str:
    lines = ["| fault | printed | training | same bits at the end |", "|---" * 4 + "|"]
    single = {r["what"]: r for r in found if ":" not in r["what"] or "trained on" in r["what"]}
    for what, r in single.items():
        said = "; ".join(dict.fromkeys(line.removeprefix("NanGuard: ") for line in r["said"])).replace("|", "/") or "nothing"
        training = "completed" if not r["code"] else "ended with an error"
        lines.append(f"| {what} | {said} | {training} | {'yes' if r['same'] else 'no'} |")
    lines += ["", "| file of the newest good snapshot | kinds of damage | detected, reported and skipped |", "|---" * 3 + "|"]
    for file in ("state.npz", "snapshot.json", "guard_state.json"):
        ways = {r["what"]: r for r in found if r["what"].startswith(f"{file}: ") and "trained on" not in r["what"]}
        if ways:
            lines.append(f"| `{file}` | {len(ways)} | {sum(r['same'] for r in ways.values())} |")
    return "\n".join(lines)


COMMANDS: dict[str, Callable[..., None]] = {
    "kills": lambda count="50", seed="0": kills(int(count), int(seed)),
    "faults": faults,
    "write": write,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(__doc__)
    COMMANDS[sys.argv[1]](*sys.argv[2:])
