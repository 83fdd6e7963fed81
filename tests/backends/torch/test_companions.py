"""Objects besides model and optimizer that a step of a loop changes: schedulers, scalers, averaged
models, its own tensors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from support.torch_steps import loss_of, watched
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from keras_nanguard import NanGuard

STEPS, BAD = 30, (11, 12, 20)
BATCHES = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 30)], [10]
    ),
    "none": lambda o: None,
}


class Own(lr_scheduler.StepLR):
    """A custom class with a `step` method."""

    def step(self, epoch=None):
        super().step()
        self.called = getattr(self, "called", 0) + 1


class Loop:
    """A network, its optimizer, and a step that changes more than these."""

    def __init__(self, scheduler="none", closure=False, averaged=True):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), 0.05, max_iter=2) if closure else torch.optim.Adam(self.net.parameters(), 0.01)
        self.scheduler = Own(self.optimizer, 5) if scheduler == "own" else SCHEDULERS[scheduler](self.optimizer)
        self.mean = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if averaged else None
        self.slow = [p.detach().clone() for p in self.net.parameters()]
        self.total, self.closure = torch.zeros(()), closure

    def loss(self, batch):
        return loss_of(self.net, batch)

    def backward(self, batch):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        return loss

    def __call__(self, batch):
        if self.closure:
            loss = self.optimizer.step(lambda: self.backward(batch))
        else:
            loss = self.backward(batch)
            self.optimizer.step()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.detach())
        elif self.scheduler is not None:
            self.scheduler.step()
        if self.mean is not None:
            self.mean.update_parameters(self.net)
        torch._foreach_lerp_(self.slow, [p.detach() for p in self.net.parameters()], 0.1)
        self.total += loss.detach()
        return loss

    def state(self):
        """Everything that the step changes."""
        plain = self.scheduler.state_dict() if self.scheduler is not None else {}
        tensors = [*self.net.parameters(), *self.slow, self.total, *(self.mean.state_dict().values() if self.mean is not None else ())]
        numbers = {k: v for k, v in plain.items() if isinstance(v, (int, float, list)) and k not in ("_schedulers", "lr_lambdas")}
        return [t.detach().clone() for t in tensors], numbers, self.optimizer.param_groups[0]["lr"]


def plain_step(net, optimizer):
    """The train step of an ordinary loop."""

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def poisoned():
    """The batches, three of which are NaN."""
    batches = BATCHES.clone()
    batches[list(BAD)] = float("nan")
    return batches


def trained(loop, batches):
    for batch in batches:
        loop(batch)
    return loop.state()


def guarded(loop, batches):
    guard, _ = watched(loop.net, [loop.optimizer], loop.__call__, batches)
    return loop.state(), guard


def assert_same(one, other):
    for left, right in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert one[1:] == other[1:]


@pytest.mark.parametrize("scheduler", [*SCHEDULERS, "own"])
def test_a_bad_step_never_happened(scheduler):
    """The run equals the one without the bad batches, bit for bit; replays for the diagnosis also
    leave no trace.
    """
    without = trained(Loop(scheduler), [b for i, b in enumerate(BATCHES) if i not in BAD])
    state, guard = guarded(Loop(scheduler), poisoned())
    assert [i.step for i in guard.incidents] == list(BAD) and all(i.diagnosis.cause == "input_nonfinite" for i in guard.incidents)
    assert_same(state, without)


def test_an_optimizer_with_a_closure():
    """The same for an optimizer that evaluates the loss itself."""
    without = trained(Loop(closure=True), [b for i, b in enumerate(BATCHES) if i not in BAD])
    state, guard = guarded(Loop(closure=True), poisoned())
    assert len(guard.incidents) == len(BAD)
    assert_same(state, without)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_learns_once_from_each_bad_step(unscaled, within):
    """Each bad step halves the scale of a `GradScaler`, as without the guard; replays do not."""

    def run(batches, watched):
        loop, scaler = Loop(averaged=False), torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10)

        def step(batch):
            loop.optimizer.zero_grad()
            loss = loop.loss(batch)
            scaler.scale(loss).backward()
            if unscaled:
                scaler.unscale_(loop.optimizer)
                torch.nn.utils.clip_grad_norm_(loop.net.parameters(), 1.0)
            scaler.step(loop.optimizer)
            if within:
                scaler.update()
            return loss

        guard = NanGuard(verbose=0)
        with guard.watch(loop.net, loop.optimizer):
            run_step = guard.step(step) if watched else step
            for batch in batches:
                run_step(batch)
                if not within:
                    scaler.update()
        return [p.detach() for p in loop.net.parameters()], scaler.get_scale(), int(scaler._growth_tracker)

    plain, with_guard = run(poisoned(), False), run(poisoned(), True)
    assert plain[1] < 2.0**16 and with_guard[1:] == plain[1:]
    for left, right in zip(plain[0], with_guard[0], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("scheduler", ["step", "one cycle", "own"])
def test_steps_after_the_end_of_training_leave_no_trace(scheduler, capsys):
    """Schedulers, averages and tensors of the loop's own are as before, and so are gradients and the
    random numbers. The loop is told.
    """
    loop, guard = Loop(scheduler), NanGuard("stop")

    def draws(batch):
        return loop(batch + 0 * torch.rand(()) * np.random.rand())

    with guard.watch(loop.net, loop.optimizer):
        step = guard.step(draws)
        step(BATCHES[0])
        step(poisoned()[BAD[0]])
        before, grads = loop.state(), [p.grad for p in loop.net.parameters()]
        generators = torch.get_rng_state(), np.random.get_state()[1:3]
        assert all(torch.isfinite(torch.as_tensor(step(batch))) for batch in BATCHES[:3])
    assert guard.stopped and guard.session.run.counts.step == 2
    assert capsys.readouterr().out.count("steps since then have no effect. End the loop if guard.stopped") == 1
    assert_same(loop.state(), before)
    assert all(p.grad is grad for p, grad in zip(loop.net.parameters(), grads))
    assert torch.equal(torch.get_rng_state(), generators[0])
    np.testing.assert_equal(np.random.get_state()[1:3], generators[1])


def test_classes_of_torch_are_as_before():
    """After the loop no method of torch is replaced."""
    before = [vars(c)["step"] for c in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)] + [torch.amp.GradScaler.update]
    guarded(Loop("step"), poisoned())
    assert before == [vars(c)["step"] for c in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)] + [torch.amp.GradScaler.update]


# What an update and a refusal depend on


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(6, 1)


def run(net, optimizer, step, batches, bad, is_watched):
    """Watch a loop, in which only the bad batches have an incident; or run it without the guard and
    these batches.
    """
    if is_watched:
        assert [i.step for i in watched(net, [optimizer], step, batches)[0].incidents] == list(bad)
    else:
        for number, batch in enumerate(batches):
            if number not in bad:
                step(batch)
    return net


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def stepping(optimizer, scaler, scheduler, net):
    """A step with a scaler and a scheduler, each of which may be `None`."""

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        return loss

    return step


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("rate", [0.01, "tensor"])
def test_a_deferred_update_uses_scale_and_rate_of_its_call(fused, scaled, rate):
    """A `GradScaler` sets the scale of a fused optimizer only for the call, and a scheduler then
    writes a rate that is a tensor in place.
    """

    def trained(is_watched):
        net = network()
        start = torch.tensor(0.01) if rate == "tensor" else rate
        optimizer = torch.optim.SGD(net.parameters(), start, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        step = stepping(optimizer, scaler, lr_scheduler.ExponentialLR(optimizer, 0.5), net)
        return run(net, optimizer, step, BATCHES[:5], (), is_watched)

    assert same(trained(True), trained(False))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("bad", [(0, 2), (0, 1, 4), (2,), (1, 7), (1, 3, 8)])
def test_gradients_of_several_steps_after_a_bad_one(bad, create_graph):
    """A refused step leaves the sum of the gradients before it, also if the first step was refused.
    With `create_graph` torch replaces the sum instead of adding to it.
    """
    batches = BATCHES[:9].clone()
    batches[list(bad)] = float("nan")

    def trained(is_watched):
        net, guard = network(), NanGuard(verbose=0)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(batch):
            loss = loss_of(net, batch)
            loss.backward(create_graph=create_graph)
            return loss

        with guard.watch(net, optimizer):
            run_step = guard.step(step)
            for number, batch in enumerate(batches):
                if is_watched:
                    run_step(batch)
                elif number not in bad:
                    step(batch)
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return net

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_writes_that_torch_does_not_count(bad, with_optimizer):
    """A refused step restores weights that it has written through `.data` before its update, and
    those that it updates by hand.
    """
    batches = BATCHES[:6].clone()
    batches[bad] = float("nan")

    def trained(is_watched):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(batch):
            optimizer.zero_grad()
            for p in net.parameters():
                p.data.mul_(0.9)
            loss = loss_of(net, batch)
            loss.backward()
            if with_optimizer:
                optimizer.step()
            else:
                for p in net.parameters():
                    p.data.sub_(p.grad, alpha=0.01)
            return loss

        return run(net, optimizer, step, batches, (bad,), is_watched)

    assert same(trained(True), trained(False))


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="torch 2.6 and later")
def test_gradients_of_a_sharded_module_after_the_end_of_training():
    """Whole parameters have them, not the shards."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = network()
        torch.distributed.fsdp.fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer, guard = torch.optim.SGD(net.parameters(), 0.01), NanGuard("stop", verbose=0)

        def step(batch):
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        with guard.watch(net, optimizer):
            run_step = guard.step(step)
            for batch in (BATCHES[0], poisoned()[BAD[0]]):
                run_step(batch)
            grads = [p.grad for p in net.parameters()]
            values = [grad.to_local().clone() for grad in grads]
            for batch in BATCHES[1:4]:
                run_step(batch)
        assert guard.stopped
        assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
        assert all(torch.equal(grad.to_local(), value) for grad, value in zip(grads, values, strict=True))
    finally:
        torch.distributed.destroy_process_group()


class Replacing(torch.nn.Linear):
    """Its buffer is another tensor after each call."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Moving(torch.nn.Linear):
    """Writes its buffer in place, and then replaces it, in each call."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(6, 1)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        self.mean.mul_(0.9)
        self.mean = self.mean.clone()
        return super().forward(x)


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [
        ("stop", poisoned()[: BAD[0] + 1], BATCHES[:3]),
        ("recover", BATCHES[:5], poisoned()[[BAD[0]]]),
    ],
    ids=["after the end of training", "bad step"],
)
def test_a_buffer_that_is_written_and_replaced(policy, before, after):
    """It is the same tensor as before, with the same values, also once others have replaced the first one."""
    net, guard = Moving(), NanGuard(policy, verbose=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    with guard.watch(net, optimizer):
        run_step = guard.step(plain_step(net, optimizer))
        for batch in before:
            run_step(batch)
        held, values = net.mean, net.mean.clone()
        for batch in after:
            run_step(batch)
    assert len(guard.incidents) == 1 and net.mean is held
    torch.testing.assert_close(held, values, rtol=0, atol=0)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer, in two calls."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.inner = torch.optim.SGD(self.param_groups, 0.01, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def climb(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["before"]
        self.inner.step()

    def step(self, closure=None):
        raise NotImplementedError


class Odd(torch.optim.SGD):
    """Keeps in its settings what no other optimizer keeps there."""

    def __init__(self, parameters, **odd):
        super().__init__(parameters, 0.01)
        self.defaults.update(odd)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adafactor(parameters, 0.01),
        lambda parameters: Odd(parameters, eps=(None, None), momentum=(0.9, 0.99)),
        lambda parameters: Odd(parameters, eps=torch.tensor(1e-3), momentum=torch.ones(2)),
        lambda parameters: Odd(parameters, eps=object(), momentum="none"),
    ],
    ids=["adafactor", "tuples", "tensors", "objects"],
)
def test_a_diagnosis_with_any_settings_of_an_optimizer(make):
    """Settings that are no numbers, such as the two `eps` of `Adafactor`, end no diagnosis."""
    net, batches = network(), BATCHES[:4].clone()
    batches[3, 2] = float("nan")
    optimizer, guard = make(net.parameters()), NanGuard(verbose=0)

    with guard.watch(net, optimizer):
        guarded = guard.step(plain_step(net, optimizer))
        for batch in batches:
            guarded(batch)
    (incident,) = guard.incidents
    assert (incident.step, incident.diagnosis.cause) == (3, "input_nonfinite")


@pytest.mark.parametrize("bad", [(), (0,), (3,), (1, 4)])
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads its weights"])
@pytest.mark.parametrize("kind", ["buffer", "counting", "sharpness"])
def test_what_modules_and_optimizers_replace_and_count(kind, reads, bad):
    """The run equals the one without the bad batches, also if the step reads its weights after the
    update, which therefore cannot wait.
    """
    batches = BATCHES[:8].clone()
    batches[list(bad)] = float("nan")

    def trained(is_watched):
        net = Replacing() if kind == "buffer" else network()
        make = {"counting": Counting, "sharpness": Sharpness}.get(kind)
        optimizer = torch.optim.SGD(net.parameters(), 0.01) if make is None else make(net.parameters())
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9) if kind == "counting" else None

        def step(batch):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            if kind == "sharpness":
                optimizer.climb()
                loss_of(net, batch).backward()
                optimizer.descend()
            else:
                optimizer.step()
            if reads:
                float(net.weight.detach().sum())
            if scheduler is not None:
                scheduler.step()
            return loss

        run(net, optimizer, step, batches, bad, is_watched)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return [t.clone() for t in net.state_dict().values()], groups

    (left, groups), (right, others) = trained(True), trained(False)
    assert all(map(torch.equal, left, right)) and groups == others


def rolled_back(loop, step):
    """Train a loop in which other code writes NaN into a weight before step 20; return what the rollback tells."""
    guard = NanGuard(verbose=0)
    with guard.watch(loop.net, loop.optimizer):
        run_step = guard.step(step)
        for number, batch in enumerate(BATCHES):
            if number == 20:
                with torch.no_grad():
                    next(loop.net.parameters())[0, 0] = float("nan")
            run_step(batch)
    (outcome,) = guard.incidents[0].outcomes
    assert outcome.action == "rollback"
    return outcome.detail


@pytest.mark.parametrize("changed", ["scheduler", "average"])
def test_a_rollback_changes_nothing_outside_twice(changed):
    """Steps that change a scheduler or an average are undone, not replayed: a snapshot has neither."""
    loop = Loop() if changed == "scheduler" else Loop(averaged=True)
    if changed == "scheduler":
        loop.scheduler = lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=STEPS + 1)
    assert "undone" in rolled_back(loop, loop.__call__)
    if changed == "scheduler":
        assert loop.scheduler.last_epoch == STEPS - 1
    else:
        assert int(loop.mean.n_averaged) == STEPS - 1


@pytest.mark.parametrize("kind", ["clamped", "cleared", "mixed keys"])
def test_a_step_that_changes_only_the_module_is_replayed(kind):
    """Weights that it clamps through `.data`, gradients that it clears; outputs in a dict of any keys."""
    loop = Loop(averaged=False)

    def step(batch):
        loss = loop.backward(batch)
        loop.optimizer.step()
        if kind == "clamped":
            for p in loop.net.parameters():
                p.data.clamp_(-1.0, 1.0)
        elif kind == "cleared":
            loop.optimizer.zero_grad(set_to_none=False)
        return {1: loss, "loss": loss} if kind == "mixed keys" else loss

    assert "replayed" in rolled_back(loop, step)
