"""A loop with a PyTorch optimizer resumes from disk, with the slots that its first update creates.
"""

from __future__ import annotations

import pytest
import torch

from keras_nanguard import NanGuard

STEPS, STOPPED = 12, 7
SNAPSHOT = {"every": 4, "verify_after": 1, "storage": "disk"}

OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def train(directory, kind, steps, resume=False):
    """Train up to a step; return the parameters and the slots."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = OPTIMIZERS[kind](net.parameters())
    x = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))

    def step_on(batch):
        optimizer.zero_grad()
        loss = (net(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    guard = NanGuard(directory=str(directory), resume=resume, verbose=0, snapshot=SNAPSHOT)
    with guard.watch(net, optimizer):
        step, resuming = guard.step(step_on), guard.session.start.resuming
        for batch in x[0 if resuming is None else resuming.record.step : steps]:
            step(batch)
    slots = [t for state in optimizer.state.values() for t in state.values() if t is not None]
    assert resume is (resuming is not None)
    return [*(p.detach() for p in net.parameters()), *slots], optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stopped", [2, STOPPED], ids=["first snapshot", "later snapshot"])
def test_ends_as_a_run_that_never_stopped(tmp_path, kind, stopped):
    """Weights, slots and rate are the same, bit for bit."""
    whole, rate = train(tmp_path / "whole", kind, STEPS)
    train(tmp_path / "run", kind, stopped)
    resumed, again = train(tmp_path / "run", kind, STEPS, resume=True)
    assert rate == again and len(whole) == len(resumed)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed))
