"""The fault campaign: thousands of seeded faults, each compared with the run without it.

    python campaigns/campaign.py --backend jax           # all faults of one backend; continues
    python campaigns/campaign.py --backend jax --quick   # two configurations; 1 if a fault is missed
    python campaigns/campaign.py --table                 # write the tables of the page

`make campaign` runs everything. campaigns/results/campaign.md describes the method.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

BACKENDS = ("tensorflow", "jax", "torch")

COUNTS = {
    "tensorflow": {"graph": 42, "XLA": 42, "steps": 42, "eager": 14},
    "jax": {"XLA": 66, "steps": 66, "eager": 10},
    "torch": {"eager": 56},
}
"""Faults of each configuration, by backend and mode: 3,094 in all. An eager step takes a hundred times as long as a compiled one."""

STEPS = {("tensorflow", "eager"): 16, ("jax", "eager"): 12}
"""Length of a run, in steps, if it is not `LENGTH`."""

LENGTH = 24


def one_thread(backend: str) -> None:
    """Let the backend compute in one thread, which is enough for these networks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if backend == "jax":
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def run(
    backend: str, results: Path, only: str = "", count: int | None = None, first: int | None = None, again: bool = False
) -> list[dict[str, Any]]:
    """Run every fault without a result, append a line for each, and return the new rows. `again`
    also repeats those with a miss.
    """
    from dataclasses import astuple

    from campaigns import fault_runs, fault_tables
    from campaigns.fault_models import configurations

    results.parent.mkdir(parents=True, exist_ok=True)
    known, fresh = fault_tables.read(results), []
    chosen = [c for c in configurations(backend) if only in c.name][:first]
    for number, c in enumerate(chosen, 1):
        mine = [row for row in fault_tables.latest(known) if "number" in row and fault_tables.key(row) == astuple(c)]
        done = frozenset(row["number"] for row in mine if not (again and fault_tables.missed(row)))
        began, cpu = time.perf_counter(), time.process_time()
        rows = fault_runs.run(c, count or COUNTS[backend][c.mode], STEPS.get((backend, c.mode), LENGTH), done)
        with results.open("a", encoding="utf-8") as file:
            for row in rows:
                fresh.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                if why := fault_tables.missed(row):
                    print(f"  {why}: {fault_tables.described(row)}", flush=True)
        spent = f"{time.process_time() - cpu:.0f} s of processor time, {time.perf_counter() - began:.0f} s"
        print(f"{number}/{len(chosen)} {c.name}: {len(fresh)} rows so far, {spent}", flush=True)
    return fresh


def main() -> int:
    """Run the command line; return 1 if a quick run has a miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default=os.environ.get("KERAS_BACKEND", "tensorflow"))
    parser.add_argument("--results", type=Path, default=Path("campaign-results"), help="folder of the results, one file for each backend")
    parser.add_argument("--only", default="", help="part of the name of a configuration, such as CNN+BN/XLA")
    parser.add_argument("--count", type=int, help="faults of each configuration")
    parser.add_argument("--quick", action="store_true", help="two configurations with six faults each; results are discarded")
    parser.add_argument("--again", action="store_true", help="repeat the faults with a miss")
    parser.add_argument("--peers", action="store_true", help="run the other tools on the same faults instead")
    parser.add_argument("--table", action="store_true", help="only write the tables of the page from the results")
    given = parser.parse_args()
    if given.table:
        from campaigns import fault_tables

        fault_tables.write(given.results)
        return 0
    os.environ["KERAS_BACKEND"] = given.backend
    one_thread(given.backend)
    if given.peers:
        from campaigns import fault_peers

        fault_peers.run(given.backend, given.results / f"peers-{given.backend}.jsonl", given.only, given.count)
        return 0
    if given.quick:
        from campaigns import fault_tables

        path = given.results / f"quick-{given.backend}.jsonl"
        path.unlink(missing_ok=True)
        return int(any(fault_tables.missed(row) for row in run(given.backend, path, given.only, 6, 2)))
    run(given.backend, given.results / f"{given.backend}.jsonl", given.only, given.count, again=given.again)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
