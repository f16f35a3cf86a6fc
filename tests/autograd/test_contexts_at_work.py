"""Contexts and passes in programs: concurrent, one after the other, accumulated, and ended."""

from __future__ import annotations

import pickle
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worlds import config, entries, nothing_left, until, world

from rpcbench import autograd
from rpcbench.base.errors import MessageTooLarge, RpcError, WorkerLostError
from rpcbench.nn import RemoteModule
from rpcbench.optim import DistributedOptimizer, clip_grad_norm_
from rpcbench.rpc import RRef, functions, remote, rpc_async, rpc_sync
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.wire.framing import Limits


def work(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
    return (x * factor).sin()


def work_via(x: torch.Tensor, to: str) -> torch.Tensor:
    return rpc_sync(to, work, (x * 2,)) * x


def wasteful(x: torch.Tensor, to: str) -> torch.Tensor:
    rpc_sync(to, work, (x,))
    return work(x)


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Server:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def gradient(self, context: int) -> torch.Tensor:
        return autograd.get_gradients(context)[self.weight]

    def modes(self, x: torch.Tensor) -> tuple[bool, bool, torch.dtype]:
        return modes(x)

    def parameter(self) -> RRef[nn.Parameter]:
        return RRef(self.weight)


# -- mode "fast"
def test_a_fast_pass_is_right_if_all_calls_are_used(agents: list[Agent]) -> None:
    x = leaf(3)
    with autograd.context() as context:
        autograd.backward(context, [rpc_sync("worker1", work_via, (x, "worker2")).sum()], mode="fast")
        found = autograd.get_gradients(context)[x]
    torch.testing.assert_close(found, torch.autograd.grad((work(x * 2) * x).sum(), x)[0])


def test_a_fast_pass_fails_at_once_and_names_the_unused_call(agents: list[Agent]) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = rpc_sync("worker1", wasteful, (x, "worker2")).sum()
        with pytest.raises(RpcError, match=r"got none: .*worker1 to worker2 \(work\)\. .*use mode='smart'"):
            autograd.backward(context, [loss], retain_graph=True, mode="fast")
        until(lambda: not any(row["passes"] for a in agents for row in a.tables()["contexts"].values()))
        autograd.backward(context, [loss])
        torch.testing.assert_close(autograd.get_gradients(context)[x], torch.autograd.grad(work(x).sum(), x)[0])


def test_an_unknown_mode_is_refused(agents: list[Agent]) -> None:
    with autograd.context() as context, pytest.raises(ValueError, match="'slow'"):
        autograd.backward(context, [leaf(1).sum()], mode="slow")  # type: ignore[arg-type]


# -- concurrent passes
def test_eight_threads_with_fifty_contexts_each_get_their_own_gradients(agents: list[Agent]) -> None:
    server: RRef[Server] = remote("worker1", Server)
    x = leaf(3)

    def train(number: int) -> None:
        for turn in range(50):
            factor = float(number * 50 + turn)
            with current.use_agent(agents[0]), autograd.context() as context:
                loss = rpc_sync("worker1", forward_scaled, (server, x, factor)).sum()
                autograd.backward(context, [loss])
                torch.testing.assert_close(autograd.get_gradients(context)[x], torch.full_like(x, factor))
                if turn % 10 == 0:
                    torch.testing.assert_close(server.rpc_sync().gradient(context), x.detach() * factor)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(train, number) for number in range(8)]:
            done.result()


def forward_scaled(server: RRef[Server], x: torch.Tensor, factor: float) -> torch.Tensor:
    return server.local_value().forward(x) * factor


def test_passes_of_one_context_can_overlap(agents: list[Agent]) -> None:
    x = leaf(3)
    with autograd.context() as context:
        losses = [rpc_async(f"worker{1 + n % 2}", work, (x, float(n))).wait().sum() for n in range(8)]
        backward = current.use_agent(agents[0])(autograd.backward)
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(backward, context, [loss]) for loss in losses]:
                done.result()
        found = autograd.get_gradients(context)[x]
    torch.testing.assert_close(found, torch.autograd.grad(sum(work(x, float(n)).sum() for n in range(8)), x)[0])


class Apart(torch.autograd.Function):
    """Records whether two of its backwards ever run at once; each waits a little for another."""

    meeting, met = threading.Barrier(2), False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        try:
            Apart.meeting.wait(0.3)
            Apart.met = True
        except threading.BrokenBarrierError:
            Apart.meeting.reset()
        return grads[0]


def apart(x: torch.Tensor) -> torch.Tensor:
    return Apart.apply(x)


def test_gradients_of_one_pass_that_arrive_together_run_one_after_the_other(agents: list[Agent]) -> None:
    x = leaf(3)
    Apart.met = False
    with autograd.context() as context:
        halves = [rpc_sync("worker1", apart, (x * factor,)) for factor in (1, 2)]
        autograd.backward(context, [torch.cat(halves).sum()])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full_like(x, 3))
    assert not Apart.met


def test_a_chain_longer_than_messages_list_is_discovered(agents: list[Agent]) -> None:
    x = h = leaf(3)
    with autograd.context() as context:
        for turn in range(24):
            h = rpc_sync(f"worker{1 + turn % 2}", work, (h, 1.0))
        autograd.backward(context, [h.sum()])
        found = autograd.get_gradients(context)[x]
    h = x
    for _ in range(24):
        h = work(h, 1.0)
    torch.testing.assert_close(found, torch.autograd.grad(h.sum(), x)[0])


def test_a_worker_that_joins_during_a_context_takes_part(agents: list[Agent], tmp_path: Path) -> None:
    x = leaf(3)
    with autograd.context() as context:
        first = rpc_sync("worker1", work, (x,))
        agents.append(start_agent(config(tmp_path, 3)))
        until(lambda: all(len(agent.members()) == 4 for agent in agents))
        autograd.backward(context, [(first * rpc_sync("worker3", work_via, (x, "worker1"))).sum()])
        found = autograd.get_gradients(context)[x]
    torch.testing.assert_close(found, torch.autograd.grad((work(x) * work(x * 2) * x).sum(), x)[0])
    until(lambda: not agents[3].tables()["contexts"])
    agents.pop().stop()


# -- accumulated
def test_gradients_of_several_contexts_accumulate_on_all_workers(agents: list[Agent]) -> None:
    near, far = remote("worker1", Server), remote("worker2", Server)
    params = [server.rpc_sync().parameter() for server in (near, far)]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1.0)
    x = leaf(3)
    with autograd.accumulator() as total:
        for factor in (1.0, 2.0, 4.0):
            with autograd.context() as context:
                loss = rpc_sync("worker1", through_both, (near, far, x * factor)).sum()
                autograd.backward(context, [loss])
                autograd.accumulate(total, context)
                torch.testing.assert_close(near.rpc_sync().gradient(context), x.detach() * factor)
        torch.testing.assert_close(autograd.get_gradients(total)[x], torch.full_like(x, 7.0))
        optimizer.step(total)
    for param in params:
        torch.testing.assert_close(param.to_here().detach(), 1 - 7 * x.detach())


def test_an_owner_that_no_accumulated_context_has_reached_keeps_its_parameters(agents: list[Agent]) -> None:
    used, unused = remote("worker1", Server), remote("worker2", Server)
    params = [server.rpc_sync().parameter() for server in (used, unused)]
    before = [param.to_here().detach().clone() for param in params]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1.0)
    with autograd.accumulator() as total:
        with autograd.context() as context:
            autograd.backward(context, [rpc_sync("worker1", forward_scaled, (used, leaf(3), 1.0)).sum()])
            autograd.accumulate(total, context)
        assert clip_grad_norm_(total, params, 1e6) > 0
        optimizer.step(total)
    changed = [not torch.equal(param.to_here(), old) for param, old in zip(params, before, strict=True)]
    assert changed == [True, False]


def through_both(near: RRef[Server], far: RRef[Server], x: torch.Tensor) -> torch.Tensor:
    return rpc_sync("worker2", forward_scaled, (far, near.local_value().forward(x), 1.0))


def test_a_worker_that_two_others_know_accumulates_once(tmp_path: Path) -> None:
    with world(tmp_path, 4) as agents:
        server: RRef[Server] = remote("worker3", Server)
        x = leaf(3)
        with autograd.accumulator() as total, autograd.context() as context:
            calls = [rpc_async(f"worker{n}", forward_at_third, (server, x)) for n in (1, 2)]
            autograd.backward(context, [sum(call.wait().sum() for call in calls)])
            autograd.accumulate(total, context)
            torch.testing.assert_close(server.rpc_sync().gradient(total), 2 * x.detach())
        del server
        nothing_left(agents)


def forward_at_third(server: RRef[Server], x: torch.Tensor) -> torch.Tensor:
    return rpc_sync("worker3", forward_scaled, (server, x, 1.0))


def test_accumulate_changes_only_the_accumulator(agents: list[Agent]) -> None:
    x = leaf(3)
    with autograd.accumulator() as total, autograd.context() as context:
        autograd.backward(context, [rpc_sync("worker1", work, (x,)).sum()])
        once = autograd.get_gradients(context)[x].clone()
        autograd.accumulate(total, context, context)
        autograd.get_gradients(total)[x].zero_()
        torch.testing.assert_close(autograd.get_gradients(context)[x], once)
    with autograd.context() as context, pytest.raises(RuntimeError, match="Could not find autograd context"):
        autograd.accumulate(context, total)


# -- grad mode, autocast, and graphs that are cut
def modes(x: torch.Tensor) -> tuple[bool, bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), (x @ x).dtype


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_call_without_grad_mode_runs_without_it_and_its_result_has_no_gradient(
    agents: list[Agent], without: Any
) -> None:
    x = leaf(1)
    with autograd.context() as context_id:
        layer, server = RemoteModule("worker1", Gain), remote("worker2", Gain)
        with without():
            made = [
                rpc_sync("worker1", torch.mul, (x, 100)),
                rpc_async("worker1", torch.mul, (x, 100)).wait(),
                remote("worker1", torch.mul, (x, 100)).to_here(),
                server.rpc_sync().forward(x),
                layer(x),
                rpc_sync("worker1", through_another, (x,)),
            ]
        assert not any(each.requires_grad for each in made)
        with torch.enable_grad():
            loss = (rpc_sync("worker1", torch.mul, (x, 3)) + sum(each.clone() for each in made)).sum()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [3]


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 100.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def through_another(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = rpc_sync("worker2", torch.mul, (x, 100))
    return made


def test_autocast_is_sent_on_request(agents: list[Agent]) -> None:
    x = torch.ones(2, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert rpc_sync("worker1", modes, (x,)) == (False, False, torch.float32)
        assert rpc_sync("worker1", autograd.same_modes(modes), (x,)) == (False, True, torch.bfloat16)
    assert rpc_sync("worker1", autograd.same_modes(modes), (x,)) == (True, False, torch.float32)


def test_a_world_can_send_the_modes_of_the_caller_with_all_calls(tmp_path: Path) -> None:
    x = torch.ones(2, 2)
    with world(tmp_path, 2, same_modes=True) as agents, torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert rpc_sync("worker1", modes, (x,)) == (False, True, torch.bfloat16)
            assert remote("worker1", modes, (x,)).to_here() == (False, True, torch.bfloat16)
            assert remote("worker1", Server).rpc_sync().modes(x) == (False, True, torch.bfloat16)
        assert not rpc_sync("worker1", nested, (x,))[0]
        assert not rpc_async("worker1", later_mode).wait()
        nothing_left(agents)


def nested(x: torch.Tensor) -> tuple[bool, bool, torch.dtype]:
    return rpc_sync("notebook", modes, (x,))


@functions.async_execution
def later_mode() -> Any:
    return rpc_async("notebook", torch.is_grad_enabled)


def test_a_cut_graph_gives_one_warning_per_function(agents: list[Agent]) -> None:
    x = leaf(3)
    with pytest.warns(UserWarning, match=r"the call of work sends .*autograd.context\(\)") as told:
        rpc_sync("worker1", work, (x * 2,))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rpc_sync("worker1", work, (x * 2,))
        rpc_sync("worker1", torch.neg, (x,))  # a leaf needs no warning
        with torch.no_grad():
            rpc_sync("worker1", torch.abs, (x * 2,))
        with autograd.context():
            rpc_sync("worker1", torch.exp, (x * 2,))


def test_a_gradient_that_ends_at_a_received_result_gives_one_warning_per_worker(agents: list[Agent]) -> None:
    x = leaf(3)
    weight = remote("worker1", Server).rpc_sync().parameter()
    with pytest.warns(UserWarning, match=r"that worker1 returned outside .*autograd\.context\(\)") as told:
        rpc_sync("worker1", work, (x,)).sum().backward()
        early = rpc_sync("worker1", work, (x,))
        with autograd.context() as context:
            autograd.backward(context, [early.sum()])
    assert len(told) == 1
    with pytest.warns(UserWarning, match="that worker2 returned outside"), autograd.context() as context:
        autograd.backward(context, [outside("worker2", work, x).sum()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agents[0].calls.values.recorder._warned.clear()  # type: ignore[union-attr]
        result = rpc_sync("worker1", work, (x,))  # only its values are used
        (pickle.loads(pickle.dumps(result)).sum() + result.detach().requires_grad_().sum()).backward()
        weight.to_here().sum().backward()
        with autograd.context() as context:
            passed_on = rpc_sync("worker2", work, (result.detach(),))
            autograd.backward(context, [(rpc_sync("worker1", work, (x,)) * passed_on).sum()])


def outside(to: str, function: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a function from a thread without a context."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(current.use_agent(current.current_agent())(rpc_sync), to, function, (x,)).result()


# -- ends
class Waiting(torch.autograd.Function):
    """Its backward waits until the gate opens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _gates["reached"].set()
        assert _gates["go"].wait(20)
        return grads[0]


def waiting(x: torch.Tensor) -> torch.Tensor:
    return Waiting.apply(x)


def test_ctrl_c_ends_a_pass_on_all_workers(agents: list[Agent]) -> None:
    x = leaf(3)
    reached, go = threading.Event(), threading.Event()
    _gates.update(reached=reached, go=go)

    def press() -> None:
        assert reached.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with autograd.context() as context:
        loss = rpc_sync("worker1", waiting, (x,)).sum()
        finger = threading.Thread(target=press)
        finger.start()
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context, [loss], retain_graph=True)
        finger.join()
        until(lambda: not any(row["passes"] for agent in agents for row in agent.tables()["contexts"].values()))
        go.set()
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[x], torch.ones_like(x))


def test_a_message_that_could_not_be_sent_is_not_recorded(agents: list[Agent]) -> None:
    x = leaf(1 << 16)
    with autograd.context() as context:
        (entry,) = entries(agents[0], agents[1])
        limits, entry._limits = entry._limits, Limits(body=4096)
        with pytest.raises(MessageTooLarge):
            rpc_sync("worker1", work, (x * 2,))
        entry._limits = limits
        assert not autograd._current_context()._send_functions()
        autograd.backward(context, [rpc_sync("worker1", work, (x,)).sum()], mode="fast")
        assert x in autograd.get_gradients(context)


def test_a_call_that_is_refused_for_an_rref_of_a_lost_owner_is_not_recorded(agents: list[Agent]) -> None:
    dead = remote("worker1", work, (leaf(1),))
    dead.to_here()
    agents.pop(1).links.peers.close()
    with pytest.raises(WorkerLostError):
        dead.to_here()
    x = leaf(3)
    with autograd.context() as context:
        with pytest.raises(WorkerLostError, match="cannot be passed on"):
            rpc_sync("worker2", work, (x * 2, dead))
        assert not autograd._current_context()._send_functions()
        autograd.backward(context, [rpc_sync("worker2", work, (x,)).sum()], mode="fast")
        assert x in autograd.get_gradients(context)


def test_a_late_call_does_not_recreate_a_released_context(agents: list[Agent]) -> None:
    go = threading.Event()
    with autograd.context(), current.use_agent(agents[0]):
        _gates["go"] = go
        answer = rpc_async("worker1", wait_and_call, (leaf(3), "worker2"))
        until(lambda: bool(agents[1].tables()["contexts"]))
    until(lambda: not agents[1].tables()["contexts"])
    go.set()
    answer.wait()
    assert not any(agent.tables()["contexts"] for agent in agents)


_gates: dict[str, Any] = {}


def wait_and_call(x: torch.Tensor, to: str) -> torch.Tensor:
    _gates["go"].wait(20)
    return rpc_sync(to, work, (x,))


def test_private_names_of_torch_are_supported(agents: list[Agent]) -> None:
    x = leaf(3)
    fresh = autograd._new_context()
    assert autograd._current_context()._context_id() == fresh._context_id()
    y = rpc_sync("worker1", work, (x,))
    (sent,), (received,) = fresh._send_functions().values(), fresh._recv_functions().values()
    assert sent.next_functions[0][0].variable is x and received is y.grad_fn
    assert "SendRpcBackward" in sent.name() and "RecvRpcBackward" in received.name()
    assert fresh._known_worker_ids() == {1}
    assert autograd._get_debug_info() == {"num_current_backward_passes": "0", "num_autograd_contexts": "1"}
    autograd._release_context(fresh._context_id())
    for look in (autograd._current_context, fresh._send_functions, lambda: autograd._retrieve_context(99)):
        with pytest.raises(RuntimeError):
            look()
    assert not autograd._is_valid_context(fresh._context_id())
