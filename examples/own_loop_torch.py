"""Your own loop on PyTorch: a torch.nn.Module, an optimizer and a scheduler of torch.optim, one Inf in the data.

    python examples/own_loop_torch.py
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch
from torch import nn

from keras_nanguard import NanGuard

torch.manual_seed(0)
x = torch.randn(640, 8)
y = x[:, :1] ** 2
x[200, 3] = torch.inf
batches = list(zip(x.split(32), y.split(32))) * 5


def build():
    """Return a model, its optimizer, and their train step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(inputs, targets):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss

    return model, optimizer, train_step


def error(model):
    """Return the mean squared error on the clean rows."""
    kept = x.isfinite().all(dim=1)
    with torch.no_grad():
        return nn.functional.mse_loss(model.eval()(x[kept]), y[kept]).item()


stock, optimizer, train_step = build()
for inputs, targets in batches:
    train_step(inputs, targets)

guarded, optimizer, train_step = build()
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
guard = NanGuard()
with guard.watch(guarded, optimizer):
    step = guard.step(train_step)
    for inputs, targets in batches:
        step(inputs, targets)
        if guard.stopped:
            break
        if not guard.refused:
            scheduler.step()  # outside of the step, so a refusal does not undo it

print(f"steps skipped: {sum(i.refused for i in guard.incidents)} of {len(batches)}")
print(f"mean squared error: {error(stock):.2f} without a guard, {error(guarded):.2f} with it")
if error(stock) < float("inf") or not error(guarded) < 1.2:
    raise SystemExit("The guard did not help here.")
