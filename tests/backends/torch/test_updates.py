"""Updates of a loop run where the step calls them; a bad step is not updated, or is undone."""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial

import pytest
import torch
from support.torch_steps import loss_of, watched

from keras_nanguard import NanGuard

STEPS, BAD = 12, (5, 6, 9)
BATCHES = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def poisoned(bad=BAD):
    batches = BATCHES.clone()
    batches[list(bad)] = math.nan
    return batches


def compared(make, bad=BAD):
    """Compare a watched run with the plain one without its bad batches, bit for bit; `make()`
    returns a network, its optimizers, a step, and further tensors. Return both lists of results.
    """
    net, optimizers, step, more = make()
    guard, results = watched(net, optimizers, step, poisoned(bad))
    assert [incident.step for incident in guard.incidents] == list(bad)
    plain, _, plain_step, plain_more = make()
    expected = [plain_step(b) for i, b in enumerate(BATCHES) if i not in bad]
    ends = [*net.parameters(), *more], [*plain.parameters(), *plain_more]
    assert all(map(torch.equal, *ends))
    return results, expected


def pair(first=0, hook=""):
    """Two networks, of which only the second one has bad batches; from the step `first` on it is
    trained, too. A hook of the first optimizer averages the first network.
    """

    def make():
        net, other, done = network(), network(1), torch.zeros(())
        optimizers = [torch.optim.Adam(n.parameters(), 0.01) for n in (net, other)]
        mean = [p.detach().clone() for p in net.parameters()]

        def write(*_):
            with torch.no_grad():
                for value, p in zip(mean, net.parameters()):
                    value.lerp_(p, 0.1)

        if hook:
            getattr(optimizers[0], f"register_step_{hook}_hook")(write)

        def update(trained, optimizer, batch):
            optimizer.zero_grad()
            loss_of(trained, batch).backward()
            optimizer.step()

        def step(batch):
            update(net, optimizers[0], batch.nan_to_num())
            if done >= first:
                update(other, optimizers[1], batch)
            done.add_(1.0)

        return torch.nn.ModuleList([net, other]), optimizers, step, [*mean, done]

    return make


def in_backward():
    """Each parameter is updated as soon as its gradient is there; then the step averages."""
    net = network()
    optimizers = {p: torch.optim.Adam([p], 0.01) for p in net.parameters()}
    mean = [p.detach().clone() for p in net.parameters()]

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(batch):
        loss = loss_of(net, batch)
        loss.backward()
        with torch.no_grad():
            for value, parameter in zip(mean, net.parameters()):
                value.lerp_(parameter, 0.1)
        return float(loss.detach())

    return net, optimizers.values(), step, mean


@pytest.mark.parametrize("bad", [(), BAD])
def test_updates_within_a_backward_pass(bad):
    """By hooks of the parameters, as torch documents it."""
    results, expected = compared(in_backward, bad)
    assert [r for i, r in enumerate(results) if i not in bad] == expected


@pytest.mark.parametrize("first", [0, 3])
def test_a_first_update_is_undone_if_the_second_one_is_bad(first):
    """Also if there is a second update only from a later step on."""
    compared(pair(first))


def copying():
    """Continues after its update with copies, and with tensors that exchange their memory."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    one, other = torch.zeros(()), torch.ones(())

    def step(batch):
        net.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        copy.deepcopy(net.state_dict())
        before = one.clone().set_(one)
        one.set_(other)
        other.set_(before)
        one.add_(1.0)

    return net, [optimizer], step, [one, other]


@pytest.mark.parametrize("bad", [(), (0, 1), BAD])
def test_tensors_whose_memory_a_step_sets(bad):
    """`copy.deepcopy` and `pickle` do so with their results."""
    compared(copying, bad)


def unwatched(replaced_at, kind):
    """One network, whose parts have one optimizer each. The guard does not know that of the first
    part, which updates first. The known one may also be replaced before a good step.
    """

    def make():
        net, done = network(), []
        first = kind(net[0].parameters(), 0.01)
        optimizers = [torch.optim.Adam(net[2].parameters(), 0.01)]
        known = list(optimizers)

        def step(batch):
            if len(done) == replaced_at:
                optimizers[0] = kind(net[2].parameters(), 0.01)
            net.zero_grad()
            loss_of(net, batch).backward()
            first.step()
            optimizers[0].step()
            done.extend([batch] if batch.isfinite().all() else [])

        return net, known, step, []

    return make


@pytest.mark.parametrize("bad", [(), (0, 2), (3, 5, 6, 9)])
@pytest.mark.parametrize("replaced_at", [0, 3, STEPS])
@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.Adam, fused=True)])
def test_an_optimizer_that_the_guard_does_not_know(kind, replaced_at, bad):
    """A refused step restores its slots, and the weights that it has updated."""
    compared(unwatched(replaced_at, kind), bad)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_what_a_hook_of_an_optimizer_writes(kind):
    """It does so in an update that is undone, because a second one is bad."""
    compared(pair(hook=kind))


@pytest.mark.parametrize("returned", ["nothing", "the loss", "a number", "a metric"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_with_finite_gradients(returned, value):
    """The loss is what the step differentiates, whatever it returns."""

    def make():
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)

        def step(batch):
            finite = batch.nan_to_num()
            optimizer.zero_grad()
            loss = loss_of(net, finite) + (0.0 if batch.isfinite().all() else value)
            loss.backward()
            optimizer.step()
            results = {"the loss": loss, "a number": loss.item(), "a metric": torch.tensor(math.nan)}
            return results.get(returned)

        return net, [optimizer], step, []

    compared(make)


@pytest.mark.parametrize("way", ["backward", "function", "scaled", "two losses"])
def test_the_losses_of_a_loop(way):
    """The loss of each step is the one that the formula gives, without the scale of a
    `GradScaler`, and it is known if the step returns nothing.
    """
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        if way == "backward":
            loss.backward()
        elif way == "function":
            torch.autograd.backward(tensors=[loss])
        elif way == "two losses":
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        if way == "scaled":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    with (guard := NanGuard(verbose=0)).watch(net, optimizer):
        run_step = guard.step(step)
        for batch in BATCHES[:5]:
            run_step(batch)
            ((_, loss),) = guard.session.run.history.last(1)
            assert loss == pytest.approx(loss_of(net, batch).item())
    assert guard.incidents == []


@pytest.mark.parametrize("bad", [(), BAD])
def test_gradients_of_functions_that_torch_transforms(bad):
    """Per-sample gradients: `torch.func` differentiates values that exist only inside of it."""

    def make():
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def loss(params, row):
            return (torch.func.functional_call(net, params, (row,)) - row.nan_to_num().sum()).square().mean()

        def step(batch):
            of_rows = torch.vmap(torch.func.grad(loss), (None, 0))(dict(net.named_parameters()), batch)
            for name, p in net.named_parameters():
                p.grad = of_rows[name].mean(0)
            optimizer.step()

        return net, [optimizer], step, []

    compared(make, bad)


class LineSearch(torch.optim.SGD):
    """Halves its step until the loss falls; the first steps overflow."""

    def step(self, closure):
        loss = closure()
        params = self.param_groups[0]["params"]
        before, grads = [p.detach().clone() for p in params], [p.grad.clone() for p in params]
        size = 1e39
        with torch.no_grad():
            while size > 1e-6:
                for p, start, grad in zip(params, before, grads):
                    p.copy_(start - size * grad)
                with torch.enable_grad():
                    now = closure()
                if now < loss:
                    break
                size *= 1e-3
        return loss


def test_trials_of_a_line_search_are_not_its_loss():
    """They may overflow in a healthy step."""
    trials = []

    def make():
        net = network()
        optimizer = LineSearch(net.parameters(), 0.1)

        def step(batch):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                trials.append(loss.item())
                return loss

            return optimizer.step(closure)

        return net, [optimizer], step, []

    compared(make, ())
    assert not all(map(math.isfinite, trials))


def test_gradients_of_a_trial_of_a_line_search():
    """They may overflow in a healthy step, which then does not move."""
    ends = []

    def make():
        net = network()
        optimizer = torch.optim.LBFGS(net.parameters(), 1e30, line_search_fn="strong_wolfe")

        def step(batch):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            ends.append(all(p.grad.isfinite().all() for p in net.parameters()))
            return loss

        return net, [optimizer], step, []

    compared(make, ())
    assert not all(ends)


def test_gradients_that_a_closure_clears_are_given_back():
    """Those of the good step before it, as if the refused step had not run."""
    net = network()
    optimizer, guard = torch.optim.LBFGS(net.parameters(), 0.01, max_iter=2), NanGuard(verbose=0)
    with guard.watch(net, optimizer):

        @guard.step
        def step(batch):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                return loss

            return optimizer.step(closure)

        for batch in BATCHES[:4]:
            step(batch)
        found = [(p.grad, p.grad.clone()) for p in net.parameters()]
        step(BATCHES[4] * math.nan)
        left = [p.grad for p in net.parameters()]
    assert [incident.step for incident in guard.incidents] == [4]
    assert all(now is then and torch.equal(now, value) for now, (then, value) in zip(left, found, strict=True))


def normalized():
    """A module whose statistics are updated once more, on the batch, after the update."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(6), network())
    optimizer = torch.optim.Adam(net.parameters(), 0.01)

    def step(batch):
        optimizer.zero_grad()
        loss_of(net, batch.nan_to_num()).backward()
        optimizer.step()
        net(batch)

    return net, [optimizer], step, list(net.buffers())


def test_a_step_that_is_bad_after_its_update():
    """Its update is undone."""
    compared(normalized)


class Spike(torch.autograd.Function):
    """The identity; its gradient is infinite where the batch is bad."""

    @staticmethod
    def forward(ctx, value, batch):
        ctx.factor = 1.0 if batch.isfinite().all() else math.inf
        return value.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.factor, None


def accumulating(scaler=None):
    """Adds up the gradients of three steps, with a scaler those of bad batches, too. Of these only
    the gradient is bad.
    """

    def make():
        net, done = network(), []
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(batch):
            loss = Spike.apply(loss_of(net, batch.nan_to_num()), batch)
            (scaler.scale(loss) if scaler else loss).backward()
            done.extend([batch] if scaler or batch.isfinite().all() else [])
            if len(done) == 3:
                done.clear()
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()

        return net, [optimizer], step, []

    return make


def test_a_bad_gradient_of_a_step_without_an_update():
    """It is refused at once, and not added up."""
    compared(accumulating())


def copied(spike):
    """The optimizer updates copies of the weights, in each step. A bad batch has bad numbers, or
    with `spike` only a bad gradient.
    """
    net = network()
    weights = list(net.parameters())
    masters = [w.detach().clone().requires_grad_() for w in weights]
    optimizer = torch.optim.Adam(masters, 0.01)

    def step(batch):
        net.zero_grad()
        (Spike.apply(loss_of(net, batch.nan_to_num()), batch) if spike else loss_of(net, batch)).backward()
        for master, weight in zip(masters, weights):
            master.grad = weight.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights):
                weight.copy_(master)

    return net, [optimizer], step, masters


@pytest.mark.parametrize("spike", [True, False])
@pytest.mark.parametrize("bad", [(), (0,), BAD])
def test_copies_of_weights_that_an_optimizer_updates(spike, bad):
    """A refused step and its diagnosis leave them as they are."""
    compared(partial(copied, spike), bad)


def test_a_rollback_restores_copies_of_weights():
    net, optimizers, step, masters = copied(True)
    policy = {"escalation": [["rollback"]], "snapshot": {"every": 3, "verify_after": 1}}
    with (guard := NanGuard(policy, verbose=0)).watch(net, *optimizers):
        run_step = guard.step(step)
        for batch in poisoned((8,))[:9]:
            run_step(batch)
    assert [outcome.status for outcome in guard.incidents[0].outcomes] == ["done"]
    assert all(map(torch.equal, net.parameters(), masters))


def test_a_bad_gradient_of_a_parameter_that_no_optimizer_updates():
    """It is no fault of a step that adds up gradients: no update will use it."""

    def make():
        net, optimizers, step, _ = accumulating()()
        net.unused = torch.nn.Parameter(torch.zeros(()))

        def with_unused(batch):
            (0.0 * net.unused.sqrt()).backward()
            step(batch)

        return net, optimizers, with_unused, []

    compared(make, ())


def delayed():
    """Updates with the gradients of the step before, and then computes the next ones."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)

    def step(batch):
        optimizer.step()
        optimizer.zero_grad()
        loss_of(net, batch).backward()

    return net, [optimizer], step, []


@pytest.mark.parametrize("bad", [(0, 1), BAD])
def test_gradients_that_the_next_step_uses(bad):
    """A refused step leaves those of the good step before it."""
    compared(delayed, bad)


def later(first):
    """Adds up the gradients of two steps each, from the good step `first` on."""

    def make():
        net, done = network(), []
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(batch):
            number = len(done) - first
            if number < 0 or number % 2 == 0:
                optimizer.zero_grad()
            loss_of(net, batch).backward()
            if number < 0 or number % 2 == 1:
                optimizer.step()
            done.extend([batch] if batch.isfinite().all() else [])

        return net, [optimizer], step, []

    return make


@pytest.mark.parametrize("first", [1, 3, 4])
def test_a_loop_that_adds_up_gradients_from_a_later_step_on(first):
    """A refused step leaves the sum of the good steps before it."""
    compared(later(first), (2, 5, 6, 9))


def adding_up(adds):
    """Adds up the gradients of two steps each, by a backward pass or by hand."""

    def make():
        net, done = network(), [0]
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(batch, updates):
            loss = loss_of(net, batch)
            if adds == "backward":
                loss.backward()
            else:
                news = torch.autograd.grad(loss, list(net.parameters()))
                for p, new in zip(net.parameters(), news):
                    if p.grad is None:
                        p.grad = new
                    else:
                        p.grad += new
            if updates:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def counted(batch):
            loss = step(batch, done[0] % 2 == 1)
            done[0] += bool(batch.isfinite().all())
            return loss

        return net, [optimizer], counted, []

    return make


@pytest.mark.parametrize("bad", [(0,), (1, 2), (3, 6)])
@pytest.mark.parametrize("adds", ["backward", "by hand"])
def test_gradients_that_a_step_adds_up_in_any_way(adds, bad):
    """A refused step leaves the sum of the good steps before it."""
    compared(adding_up(adds), bad)


@pytest.mark.parametrize("bad", [0, 1])
def test_gradients_that_a_second_function_of_a_loop_adds_up(bad):
    """The first one, which clears all gradients, has shown nothing about the second one."""
    ends = []
    for guarded in (True, False):
        net, guard = network(), NanGuard(verbose=0)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def clearing(batch, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()

        def adding(batch, net=net, optimizer=optimizer):
            parameters = list(net.parameters())
            for p, new in zip(parameters, torch.autograd.grad(loss_of(net, batch), parameters)):
                p.grad += new
            optimizer.step()

        with guard.watch(net, optimizer) if guarded else contextlib.nullcontext():
            first, second = map(guard.step, (clearing, adding)) if guarded else (clearing, adding)
            for batch in BATCHES[:2]:
                first(batch)
            for number, batch in enumerate(BATCHES[2:6]):
                if guarded and number == bad:
                    second(batch * math.nan)
                second(batch)
        assert [incident.step for incident in guard.incidents] == [2 + bad] * guarded
        ends.append(list(net.parameters()))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_gradients_that_a_compiled_step_adds_up(bad):
    """The same; torch shows no backward pass of a compiled step."""
    ends = []
    for guarded in (True, False):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(batch, updates, net=net, optimizer=optimizer):
            loss = loss_of(net, batch)
            loss.backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        compiled, guard = torch.compile(step, backend="eager"), NanGuard(verbose=0)
        with guard.watch(net, optimizer) if guarded else contextlib.nullcontext():
            run = guard.step(compiled) if guarded else compiled
            for number, batch in enumerate(BATCHES[:8]):
                if guarded and number == bad:
                    run(batch * math.nan, number % 2 == 1)
                run(batch, number % 2 == 1)
        assert [incident.step for incident in guard.incidents] == [bad] * guarded
        ends.append(list(net.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(*ends))  # another compiler


@pytest.mark.parametrize("bad", [(0, 2), (1, 5, 6, 9)])
def test_a_backward_pass_and_an_update_in_two_functions(bad):
    """If the first one is refused, the second one has no gradients to use."""
    ends = []
    for is_watched in (True, False):
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)

        def differentiate(batch, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss_of(net, batch).backward()

        with (guard := NanGuard(verbose=0)).watch(net, optimizer):
            functions = differentiate, lambda optimizer=optimizer: optimizer.step()
            backward, update = map(guard.step, functions) if is_watched else functions
            for number, batch in enumerate(poisoned(bad)):
                if is_watched or number not in bad:
                    backward(batch)
                    update()
        assert len(guard.incidents) == len(bad) * is_watched
        ends.append(list(net.parameters()))
    assert all(map(torch.equal, *ends))


def test_a_scaler_handles_an_overflow_of_steps_without_an_update():
    """As without the guard: the update is skipped, the scale falls, and training continues."""
    ends = []
    for is_watched in (True, False):
        scaler = torch.amp.GradScaler("cpu")
        net, optimizers, step, _ = accumulating(scaler)()
        if is_watched:
            assert watched(net, optimizers, step, poisoned())[0].incidents == []
        else:
            for batch in poisoned():
                step(batch)
        ends.append([*net.parameters(), torch.tensor(scaler.get_scale())])
    assert all(map(torch.equal, *ends)) and ends[0][-1] < 2.0**16


@pytest.mark.parametrize("bad", [(), BAD])
def test_a_scaler_that_is_not_enabled(bad):
    """As in code that enables it for float16 only."""

    def make():
        net, scaler = network(), torch.amp.GradScaler("cpu", enabled=False)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)

        def step(batch):
            optimizer.zero_grad()
            scaler.scale(Spike.apply(loss_of(net, batch.nan_to_num()), batch)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        return net, [optimizer], step, []

    compared(make, bad)


def test_a_sum_of_gradients_that_is_bad():
    """The gradients of rows are added up unnoticed; the next update is refused, and training
    continues without this sum.
    """
    net, done = network(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(batch):
        losses = (net(batch.nan_to_num()) - 1.0).square()
        Spike.apply(losses, batch).backward(torch.ones_like(losses))
        done.append(batch)
        if len(done) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    guard, _ = watched(net, [optimizer], step, [*poisoned()[:6], *BATCHES[:6]])
    assert [incident.step for incident in guard.incidents] == [5]
