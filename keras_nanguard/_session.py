"""One guarded run on the host's side: reads each step's verdict, and turns a bad one into an incident and its cure.

Everything happens on the main thread, right after the step and before any callback sees the model. In the healthy case
that is: read one row of numbers, count, and every hundred steps copy the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_nanguard import _perform, _probes, _state
from keras_nanguard._errors import GuardError
from keras_nanguard._incident import SITES, Finding, Incident
from keras_nanguard._policy import Ledger, Policy, decide
from keras_nanguard._rates import Rate
from keras_nanguard._recalibration import Recalibration
from keras_nanguard._snapshot import Ring
from keras_nanguard._step._verdict import Report, Verdict
from keras_nanguard._trend import Trend

__all__ = ["Session"]


class Session:
    """The host's half of the transaction.

    Args:
        model: the guarded model.
        policy: what to do about incidents.
        tell: called with each complete incident.
        ledger: what the policy remembers of earlier fits.
        explain: returns the diagnosis of a refused step, given the incident and its report; `None` makes none.
        optimizers: the optimizers of a loop with no trainer; those of the model by default.

    Attributes:
        step: train steps that are complete, refused ones included.
        refused: how many of them were refused.
        overflows: how many of those were ordinary float16 overflows, which are no incident.
        epoch, epoch_start: the epoch that runs, and the step it started at.
        stopped: whether the policy has ended training.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        tell: Callable[[Incident], None],
        *,
        ledger: Ledger | None = None,
        explain: Callable[[Session, Incident, Report | None], Any] | None = None,
        optimizers: Any = None,
        functions: Any = None,
    ):
        self.model, self.policy, self.tell, self.explain = model, policy, tell, explain
        self.optimizers = optimizers
        self.functions = dict(functions or {})
        self.ledger = ledger or Ledger()
        self.trend = Trend(policy.checks.trend)
        self.ring = Ring(policy.snapshot.keep, policy.snapshot.good_after)
        self.rates: dict[int, Rate] = {}
        self.step = self.refused = self.overflows = self.good = 0
        self.epoch = self.epoch_start = self.epoch_refused = 0
        self.streak = 0
        self.stopped = self.began = self.last_refused = self.told_predictions = False
        self.rollbacks = self.skip_batches = 0
        self.lowered_at: int | None = None
        self.recovery: tuple[int, int] | None = None
        self.scale_bounds: tuple[float, float] | None = None
        self.recalibration: Recalibration | None = None
        self.undo: list[tuple[Any, str, Any]] = []
        self.directory: str | None = None
        self.transaction: Any = None
        self.rebuild: Callable[[], None] = lambda: None
        self.tolerated: set[int] = set()
        self._births: dict[int, Any] | None = {}
        self._due = policy.snapshot.every

    def anatomy(self) -> _state.Anatomy:
        """Return the anatomy of the model as it is now."""
        return _state.Anatomy.of(self.model, self.optimizers)

    def begin(self) -> None:
        """Look at the state before the first step: keep it, or say at once that it is bad."""
        self.began = True
        anatomy = self.anatomy()
        tolerated = [v for v in anatomy.constants if not _probes.is_finite(_state.view(v))]
        tolerated = [v for v in tolerated if not _has_nan(v)]
        self.tolerated = {id(v) for v in tolerated}
        if self.transaction is not None:
            self.transaction.tolerate(tolerated)
        bad = self.ring.take(anatomy.restorable, 0, 0, verified=True, tolerated=self.tolerated)
        if bad:
            self._raise_incident(self.step, self._scan("state"), refused=False, report=None, values={})

    def begin_epoch(self, epoch: int) -> None:
        """Count batches and refused steps from here."""
        self.epoch, self.epoch_start, self.epoch_refused = epoch, self.step, 0

    def born(self, native: Any, value: Any) -> None:
        """Note the first value of a variable of the backend's own that came into being while the step was traced."""
        if self._births is not None:
            self._births[id(native)] = value

    def _complete_first(self) -> None:
        births, self._births = self._births or {}, None
        for variable in self.anatomy().restorable:
            if id(variable.value) in births:
                self.ring.complete(variable, births[id(variable.value)])

    def before(self, iterator: Any = None) -> None:
        """Run before each execution; does work only before the first, and after the policy has changed something."""
        if not self.began:
            self.begin()
        while self.skip_batches > 0 and iterator is not None:
            self.skip_batches -= 1
            next(iterator)
        for rate in self.rates.values():
            rate.hold()

    def after(self, row: Any) -> None:
        """Read the row of the last step and act on it.

        Raises:
            NonFiniteError: where the policy says so.
        """
        if self._births is not None:
            self._complete_first()
        verdict = Verdict.of(row)
        self.last_refused = verdict.refused
        if self.transaction.counted:
            self._after_many(verdict)
            return
        if verdict.refused:
            self._refused(verdict, self.transaction.files.take())
        elif verdict.sound:
            self._good(verdict)
        else:
            self._unrefused(verdict, self.transaction.files.take())
        self.step += 1
        self._keep()

    def _after_many(self, last: Verdict) -> None:
        """The same for an execution of several steps, of which `last` is the row of the last one."""
        end = last.step + 1
        for report in self.transaction.files.take():
            verdict = report.verdict
            self.good += verdict.step - self.step
            self.step = verdict.step
            if not verdict.refused:
                self._unrefused(verdict, [report])
                self.step += 1
                continue
            if verdict.halted:
                self._left_out(end - self.step)
                self.step -= 1
                self._poisoned(verdict)
                self.step = end
                break
            self._refused(verdict, [report])
            self.step += 1
        if self.step < end:
            self.good += end - 1 - self.step
            self.step = end - 1
            if last.sound:
                self._good(last)
            else:
                self._unrefused(last, [])
        self.step = end
        self._keep()

    def _left_out(self, steps: int) -> None:
        self.refused += steps
        self.epoch_refused += steps

    def _good(self, verdict: Verdict) -> None:
        self.good += 1
        self.streak = 0
        norm = verdict.gradient_norm
        if self.recovery is not None:
            self._recover(*self.recovery)
        if self.scale_bounds is not None:
            self._bound_scale(*self.scale_bounds)
        if self.recalibration is not None and self.recalibration.step():
            self.recalibration = None
        findings = self.trend.push(self.step, verdict.loss, norm)
        if findings:
            self._raise_incident(self.step, findings, refused=False, report=None, values=self._values(verdict))

    def _recover(self, after: int, ramp: int) -> None:
        """Bring a lowered rate back, `after` good steps after it was lowered, over `ramp` steps."""
        assert self.lowered_at is not None
        since = self.step - self.lowered_at - after
        if since < 0:
            return
        share = 1.0 if ramp <= 0 else min(since / ramp, 1.0)
        for rate in self.rates.values():
            rate.raise_to(rate.lowest ** (1.0 - share))
        if share >= 1.0:
            self.recovery = self.lowered_at = None

    def _bound_scale(self, floor: float, ceiling: float) -> None:
        for scale, _ in self.anatomy().scales:
            value = float(_state.read(scale))
            if not floor <= value <= ceiling:
                _state.write(scale, min(max(value, floor), ceiling))

    def start_recalibration(self, layers: list[Any], batches: int) -> None:
        """Estimate the statistics of these layers anew over the next steps."""
        self.recalibration = Recalibration(layers, batches)

    def _refused(self, verdict: Verdict, reports: list[Report]) -> None:
        self._left_out(1)
        report = reports[-1] if reports else None
        if self._is_ordinary_overflow(verdict):
            self.overflows += 1
            return
        findings = report.findings() if report is not None else Report(verdict, (), ()).findings()
        findings = [*_in_batch(report), *self._scan("state"), *findings]
        self._raise_incident(self.step, findings, refused=True, report=report, values=self._values(verdict))

    def _is_ordinary_overflow(self, verdict: Verdict) -> bool:
        """Whether dynamic loss scaling deals with this by itself: a short streak of overflows above the lowest scale."""
        anatomy = self.anatomy()
        check = self.policy.checks.loss_scale
        if not anatomy.scales or not verdict.only_gradients:
            self.streak = 0
            return False
        self.streak += 1
        return self.streak <= check.patience and verdict.scale * 0.5 >= check.min_value

    def _unrefused(self, verdict: Verdict, reports: list[Report]) -> None:
        """A bad step that was committed: by an update that overflowed, or because nothing refuses here."""
        if self.policy.refuse:
            self._poisoned(verdict)
        else:
            self._observed(verdict, reports)

    def _poisoned(self, verdict: Verdict) -> None:
        """A step left a state behind that is not finite."""
        findings = self._scan("weights") or [Finding("weights", "explosion", value=verdict.weights)]
        self._raise_incident(self.step, findings, refused=False, report=None, values=self._values(verdict))
        self.transaction.resume()

    def _observed(self, verdict: Verdict, reports: list[Report]) -> None:
        """A bad step under a policy that changes nothing: told once, not again until a sound step has come between."""
        if self.streak:
            return
        self.streak = 1
        report = reports[-1] if reports else None
        findings = [*_in_batch(report), *(report.findings() if report else ()), *self._scan("weights")]
        findings = findings or Report(verdict, (), ()).findings()
        self._raise_incident(self.step, findings, refused=False, report=report, values=self._values(verdict))

    def _scan(self, site: str) -> list[Finding]:
        """Read the whole state; returns a finding for each variable that is not finite.

        With site `state` all of them are told as trouble that was there before the step, else each under its own site.
        """
        anatomy = self.anatomy()
        groups = {"weights": anatomy.trainable, "statistics": anatomy.statistics, "slots": anatomy.slots}
        findings = []
        for own, variables in groups.items():
            for variable in variables:
                nan, inf, size = _probes.counts(_state.view(variable))
                if nan or (inf and id(variable) not in self.tolerated):
                    told = "state" if site == "state" else own
                    findings.append(Finding(told, "nonfinite", variable.path, nan, inf, size))
        return findings

    def _values(self, verdict: Verdict) -> dict[str, float]:
        values = {"loss": verdict.loss, "gradient_norm": verdict.gradient_norm}
        optimizers = self.anatomy().optimizers
        if optimizers:
            values["learning_rate"] = _state.learning_rate(optimizers[0])
        if any(_state.is_loss_scaled(o) for o in optimizers):
            values["loss_scale"] = verdict.scale
        return values

    def _raise_incident(
        self,
        step: int,
        findings: Sequence[Finding],
        *,
        refused: bool,
        report: Report | None,
        values: dict[str, float],
    ) -> None:
        ordered = tuple(sorted(findings, key=lambda f: SITES.index(f.site)))
        incident = Incident(step, self.epoch, max(step - self.epoch_start, 0), ordered, refused, values)
        if self.explain is not None:
            incident = incident.with_(diagnosis=self.explain(self, incident, report))
        decision, self.ledger = decide(self.policy, self.ledger, incident)
        incident = incident.with_(decision=decision)
        outcomes, error = _perform.perform(self, incident, report)
        incident = incident.with_(outcomes=outcomes)
        self.tell(incident)
        if error is not None:
            error.incident = incident
            raise error

    def _keep(self) -> None:
        """Take a snapshot when one is due and nothing is wrong."""
        if self.step < self._due or self.stopped:
            return
        self._due = self.step + self.policy.snapshot.every
        anatomy = self.anatomy()
        bad = self.ring.take(anatomy.restorable, self.step, self.good, tolerated=self.tolerated)
        if bad:
            self._raise_incident(self.step - 1, self._scan("weights"), refused=False, report=None, values={})

    def seen_outside(self, findings: list[Finding], batch: int | None = None) -> None:
        """Tell of trouble that evaluation or prediction showed."""
        findings = [*findings, *(f for f in self._scan("weights") if f.site != "slots")]
        self._raise_incident(max(self.step - 1, 0), findings, refused=False, report=None, values={})

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer, which remembers what the guard has done to it."""
        return self.rates.setdefault(id(optimizer), Rate(optimizer))

    def end(self) -> None:
        """Take off the optimizers what the guard has put on them."""
        for target, name, value in reversed(self.undo):
            setattr(target, name, value)
        self.undo.clear()
        for rate in self.rates.values():
            rate.release()


def _has_nan(variable: Any) -> bool:
    return _probes.counts(_state.view(variable))[0] > 0


def _in_batch(report: Report | None) -> list[Finding]:
    """Return findings for the inputs and targets of a refused step."""
    if report is None or report.batch is None:
        return []
    if len(report.batch) != 1:
        parts = {"inputs": report.batch}
    else:
        data = report.batch[0]
        data = data if isinstance(data, tuple) else (data,)
        parts = {"inputs": data[:1], "targets": data[1:]}
    findings = []
    for site, part in parts.items():
        for name, array in _state.named_arrays(part):
            nan, inf, size = _probes.counts(array)
            if nan or inf:
                findings.append(Finding(site, "nonfinite", name, nan, inf, size))
    return findings


def require_compiled(model: Any) -> None:
    """Raise where the model cannot be trained.

    Raises:
        GuardError: if the model is not compiled, or was compiled without an optimizer.
    """
    if not getattr(model, "compiled", False):
        raise GuardError(
            f"Expected a compiled model. Received: model={getattr(model, 'name', model)!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) before fit."
        )
    if not _state.find_optimizers(model):
        raise GuardError(
            f"Expected a model with an optimizer. Received: model={model.name!r} with optimizer="
            f"{getattr(model, 'optimizer', None)!r}. Pass an optimizer to compile, or use guard.watch(model, *optimizers)."
        )
