"""Processes that train together on PyTorch: `python torch_processes.py DIRECTORY PROGRAM:FAULT[:PROCESSES] ...`.

Each case runs in separate processes, which are forks of this one, so PyTorch is imported once.
Prints one line of JSON for each case: the result of each process by its rank, `null` for one that
was killed.

Programs: `module` and `own buffers` (`DistributedDataParallel` around a module with BatchNorm, `broadcast_buffers` on and
off), `keras` (around a Keras model with a Keras optimizer), `accumulate` (two backward passes for each update, the first
under `no_sync`), `sharded` (`fully_shard`), `reports` (the step sums its loss up over all processes), `conditional` (the
same, and a process updates only for some of its batches).
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import sys
import time
import traceback

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from keras_nanguard import NanGuard

STEPS, ROWS, BAD = 24, 8, 11
"""Steps of a run, rows of the batch of one process, and the first step with a fault."""

LIMIT = 60
"""Seconds that a process waits for another, and that a case may take after that."""

POLICY = {"snapshot": {"every": 4, "verify_after": 1}}


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def keras_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


def program(kind):
    """Return a step, the watched objects, its optimizer, and the parameters."""
    net = keras_model() if kind == "keras" else module()
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        model = fully_shard(net)
    else:
        model = DistributedDataParallel(net, broadcast_buffers=kind != "own buffers")
    if kind == "keras":
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(net.trainable_variables)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss_of(x):
        value = (model(x) - x.sum(1, keepdim=True)).square().mean()
        return value * torch.where(x[0, 0] == 123.0, torch.nan, 1.0)

    def train(x):
        model.zero_grad()
        loss = loss_of(x)
        loss.backward()
        if kind == "keras":
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in net.trainable_variables], net.trainable_variables)
        elif kind != "conditional" or x[0, 0] < 0.5:
            optimizer.step()
        if kind in ("reports", "conditional"):
            distributed.all_reduce(loss.detach())
        return loss

    def accumulate(x):
        optimizer.zero_grad()
        half = len(x) // 2
        with model.no_sync():
            loss_of(x[:half]).backward()
        loss = loss_of(x[half:])
        loss.backward()
        optimizer.step()
        return loss

    watched = (net, optimizer) if kind in ("keras", "sharded") else (model, optimizer)
    return accumulate if kind == "accumulate" else train, watched, list(model.parameters()), optimizer


def batches(rank, fault, world):
    x = torch.randn(STEPS, ROWS, 6, generator=torch.Generator().manual_seed(rank))
    last = world - 1
    if fault == "row" and rank == last:
        x[BAD, 5, 2] = torch.nan
    if fault == "batch" and rank == 0:
        x[BAD] = torch.nan
    if fault == "all":
        x[BAD] = torch.nan
    if fault in ("three", "memory") and rank == 0:
        x[BAD : BAD + 3] = torch.nan
    if fault == "loss" and rank == 0:
        x[BAD : BAD + 3, 0, 0] = 123.0
    if fault == "spike" and rank == 0:
        x[BAD : BAD + 3] *= 1e4
    return x


def run(rank, world, kind, fault, folder):
    """Train, and return the final state."""
    train, watched, parameters, optimizer = program(kind)
    if fault == "memory" and rank == world - 1:
        from keras_nanguard._core import memory

        memory.SMALL, memory.room = 0, lambda root=None: 0.0
    kept = {}
    if fault in ("whole", "die", "resume"):
        kept = {"directory": f"{folder}-whole" if fault == "whole" else folder}
        kept["resume"] = fault == "resume"
    preset = "observe" if fault == "observed" else "recover"
    guard = NanGuard(preset, verbose=0, **(DISK if kept else POLICY), **kept)
    data, error, done = batches(rank, fault, world), None, 0
    left_out = {"without": [BAD], "without three": [BAD, BAD + 1, BAD + 2]}.get(fault, [])
    plain = fault in ("plain", *(["without"] if fault == "without" else []), "without three")
    try:
        if plain:
            for number, x in enumerate(data):
                if number not in left_out:
                    train(x)
        else:
            with guard.watch(*watched):
                step = guard.step(train)
                resuming = guard.session.start.resuming
                first = 0 if resuming is None else resuming.record.step
                for done, x in enumerate(data[first:], first):
                    if fault in ("kill", "die") and rank == world - 1 and done == BAD:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if fault == "raise" and rank == world - 1 and done == BAD:
                        raise OSError("disk full")
                    if fault == "weights" and rank == 0 and done == BAD:
                        with torch.no_grad():
                            local(parameters[0]).view(-1)[0] = torch.nan
                    if fault in ("slots", "observed") and rank == 0 and done == BAD:
                        spoil(optimizer)
                    step(x)
                    if guard.stopped:
                        break
    except Exception as raised:  # noqa: BLE001  reported
        error = "\n".join([f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", ())])
        if os.environ.get("SHOW"):
            traceback.print_exc()
    return {
        "error": error,
        "steps": done,
        "weights": [local(p).double().flatten().tolist() for p in parameters],
        "optimizer": slots(optimizer),
        "rate": float(optimizer.learning_rate.value) if kind == "keras" else optimizer.param_groups[0]["lr"],
        "snapshots": [s.step for s in guard.session.run.ring.snapshots] if guard.session is not None else [],
        "incidents": [
            {
                "step": i.step,
                "refused": i.refused,
                "cause": i.diagnosis.cause,
                "evidence": list(i.diagnosis.evidence),
                "findings": [str(f) for f in i.findings],
                "outcomes": [str(o) for o in i.outcomes],
                "line": str(i),
            }
            for i in guard.incidents
        ],
    }


DISK = {"snapshot": {"every": 4, "verify_after": 1, "storage": "disk"}}


def local(parameter):
    return getattr(parameter, "_local_tensor", parameter).detach()


def spoil(optimizer):
    """Write NaN into the first moment of a weight."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        moment = next(v.value for v in optimizer.variables if len(v.shape) == 2)
    else:
        moment = next(iter(optimizer.state.values()))["exp_avg"]
    with torch.no_grad():
        local(moment).view(-1)[0] = torch.nan


def slots(optimizer):
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return [v.value.double().flatten().tolist() for v in optimizer.variables]
    states = list(optimizer.state.values())
    return [[local(t).double().flatten().tolist() for t in state.values() if isinstance(t, torch.Tensor)] for state in states]


def case(directory, number, kind, fault, world):
    """Run one case in separate processes; return the result of each."""
    started, children = time.monotonic(), []
    for rank in range(world):
        file = os.path.join(directory, f"{number}-{rank}.json")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                limit = datetime.timedelta(seconds=LIMIT)
                meeting = f"file://{os.path.join(directory, f'meet-{number}')}"
                distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)
                left = run(rank, world, kind, fault, os.path.join(directory, f"run-{kind}"))
                with open(file, "w") as stream:
                    json.dump(left, stream)
                code = 0
            except BaseException:  # noqa: BLE001  a fork must not continue as its parent
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append((child, file))
    found = []
    for child, file in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() - started > 4 * LIMIT:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        found.append(json.loads(pathlib.Path(file).read_text()) if os.path.exists(file) else None)
    return found


def main():
    directory, *cases = sys.argv[1:]
    os.makedirs(directory, exist_ok=True)
    import keras_nanguard._diagnose.explainer
    import keras_nanguard._fit.session  # noqa: F401  what each process would import

    for number, text in enumerate(cases):
        kind, fault, *world = text.split(":")
        print(json.dumps(case(directory, number, kind, fault, int(world[0]) if world else 2)), flush=True)


if __name__ == "__main__":
    main()
