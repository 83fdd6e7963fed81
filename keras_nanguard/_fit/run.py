"""The parts of one guarded run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from keras_nanguard._backends import current
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.agreement import agreement
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.live_state import LiveState
from keras_nanguard._fit.recent_batches import Recent, Rerun
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._fit.sightings import bad_state
from keras_nanguard._fit.snapshots import Ring
from keras_nanguard._fit.snapshots_on_disk import DiskRing
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.recorder import Recorder

__all__ = ["Run"]


class Run:
    """The parts of one guarded run.

    Args:
        model: the guarded model.
        policy: the policy.
        optimizers: the optimizers of a loop without a trainer; by default those of the model.
        functions: the functions that the policy may call, by name.
        directory: folder for files; `None` writes nothing.
        say: prints a line.
        recorder: stores measurements and events.
        bad_rows: the bad rows of the data so far.

    Attributes:
        state: the train state of the model.
        counts: the counters.
        recovery: the changes of the policy.
        history, recent, ring: measurements, batches and snapshots of the steps so far.
        short_of_memory: copies that did not fit and were reported.
        agreement: how several processes that train together make one decision.
        transaction: the guarded step; `None` before it is created.
        rerun: the undone steps that are to be replayed.
        poles: the iterations at which a schedule gives no usable rate, by `id` of the optimizer.
        began: whether the state before the first step was checked.
        stopped: whether the policy has ended training.
        failed: whether the epoch is to log the worst metrics (`stop = { log_worst_metrics = true
            }`).
        healed: whether the state was replaced since this was last set to `False`.
        checks_fully: whether the next step is checked more closely than a healthy one needs.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        *,
        optimizers: Any = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        directory: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        recorder: Recorder | None = None,
        bad_rows: BadRows | None = None,
    ):
        self.recorder = Recorder() if recorder is None else recorder
        self.bad_rows = BadRows(self.recorder, None) if bad_rows is None else bad_rows
        self.policy, self.functions, self.directory, self.say = (
            policy,
            functions or {},
            directory,
            say,
        )
        self.state, self.counts = LiveState(model, optimizers), Counts()
        self.recovery = Recovery(self.state, self.counts)
        self.history, self.recent = History(), Recent()
        kept = policy.snapshot
        self.agreement = agreement(model, loop=optimizers is not None)
        self.ring = Ring(kept.keep, kept.good_steps)
        if directory is not None and kept.storage == "disk":
            if current.host().is_sharded(model):
                remedy = 'Use storage = "memory", no resume=True, and torch.distributed.checkpoint.'
                received = 'storage = "disk" for a module that fully_shard has split'
                raise GuardError(expected("a model that one process can save", received, remedy))
            self.ring = DiskRing(kept.keep, kept.good_steps, directory, self.recovery, say)
        self.ring.agree_on_room = self.agreement.room
        self.short_of_memory: set[str] = set()
        self.transaction: Any = None
        self.rerun: Rerun | None = None
        self.poles: dict[int, set[int]] = {}
        self.began = self.stopped = self.failed = self.healed = False
        self.checks_fully = True

    @property
    def model(self) -> Any:
        """The guarded model."""
        return self.state.model

    @property
    def tolerated(self) -> Set[int]:
        """The `id` of each variable that may be infinite."""
        return self.state.tolerated

    @property
    def step(self) -> int:
        """Number of complete train steps, including refused ones."""
        return self.counts.step

    @property
    def refused(self) -> int:
        """Number of refused steps."""
        return self.counts.refused

    @property
    def overflows(self) -> int:
        """Number of refused steps that were ordinary float16 overflows, which are not incidents."""
        return self.counts.overflows

    running_again = False
    """Whether steps are being run again."""

    reruns = 0
    """How often they were begun anew, since they are."""

    def run_again(self) -> None:
        """Replay the steps that a rollback has undone, if there are any."""

    def train_state(self) -> TrainState:
        """Return the train state of the last trace. Its variables have or read as the present
        values.
        """
        return self.state.train_state()

    def scan(self, site: str) -> list[Finding]:
        """Read the whole state; see `sightings.bad_state`."""
        train_state = self.train_state()
        if not self.began:
            self.state.tolerate(train_state)
        return bad_state(
            train_state, site, self.state.tolerated, self.state.nan_markers, self.policy
        )
