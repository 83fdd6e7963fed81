"""A policy file: your own rules decide who is notified, and when a run ends. They are in policy.toml next to this script.

    python examples/policy_file.py
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from keras_nanguard import NanGuard, Policy

FILE = Path(__file__).with_name("policy.toml")

rng = np.random.default_rng(0)
x = rng.standard_normal((1280, 6)).astype("float32")
y = x[:, :1] - x[:, 1:2]
x[700:, 2] = np.where(rng.random(580) < 0.05, np.nan, x[700:, 2])  # from here on the third sensor sometimes fails

policy = Policy.load(FILE)
print(f"{len(policy.rules)} rules; ends after at most {policy.max_consecutive_refused} bad steps in a row")

called = []
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
guard = NanGuard(policy, functions={"page_someone": called.append})
history = model.fit(x, y, batch_size=32, epochs=5, shuffle=False, verbose=0, callbacks=[guard])
bad = guard.bad_samples()

print(f"called once, at step {called[0].step + 1}: {called[0].diagnosis.cause} in {called[0].diagnosis.culprit!r}")
print(f"bad rows: {len(bad)}; the first is {bad[0].label}")
print(f"stopped in epoch {len(history.epoch)} of 5, weights finite: {all(np.isfinite(w).all() for w in model.get_weights())}")
if len(called) != 1 or len(bad) != 16 or len(history.epoch) != 1:
    raise SystemExit("The policy was not followed.")
