"""A pass in parts equals one local backward: the same gradients, and each hook runs once."""

from __future__ import annotations

import threading

import pytest
import torch
from random_graphs import RandomGraph, same

from rpcbench.autograd import regions
from rpcbench.autograd.graph import attach_recv_node, gradient_edges
from rpcbench.autograd.regions import LocalPass
from rpcbench.base.errors import ProtocolError

ONE = torch.ones(1, dtype=torch.double)


def number(value=1.0, dtype=torch.double):
    return torch.full((1,), value, dtype=dtype).requires_grad_()


def square(runs):
    """A hook that is not linear."""
    return lambda grad: runs.append(grad.item()) or grad * grad


class Residual:
    """`loss = 2 * (5 * reply + 3 * h)`, where `h = 2 * weight`, and `7 * h` was sent to get the reply."""

    def __init__(self):
        self.weight = number()
        self.h = self.weight * 2
        (self.reply,) = attach_recv_node([number()], "reply")
        self.loss = 2 * (self.reply * 5 + self.h * 3)
        self.roots = {"loss": gradient_edges([self.loss]), "send": gradient_edges([self.h * 7])}


# -- against one local backward


@pytest.mark.parametrize("block", range(8))
def test_passes_over_random_graphs_equal_one_local_backward(block):
    for seed in range(block * 50, block * 50 + 50):
        graph = RandomGraph(seed)
        passes = graph.passes()
        assert graph.agrees(passes, retain_graph=len(passes) > 1 or seed % 2 == 0), seed


def captured(starts, ends, taps_, retain_graph):
    """A wrong way to run a part: torch's engine captures the gradients that leave it."""
    every = [*ends, *dict.fromkeys(target for edges_ in taps_.values() for _, target in edges_)]
    grads = torch.autograd.grad(list(starts), every, list(starts.values()), retain_graph, allow_unused=True)
    return grads[: len(ends)], list(zip(every[len(ends) :], grads[len(ends) :], strict=True))


MUTANTS = {
    "captured, not tapped": (regions, "run_tapped", captured),
    "only what the engine computes anyway": (regions, "compute_apart", lambda ran, targets: [[None] * 9]),
    "the last gradient, no sum": (
        regions.Region, "add_gradient", lambda part, edge, grad: part.entries.update({edge: grad}),
    ),
    "leaves with hooks shared": (regions, "_is_bare_leaf", regions.is_leaf),
    "leaves shared always": (
        regions.RegionOrder,
        "_place_node",
        lambda plan, *args, _place=regions.RegionOrder._place_node, **share: _place(plan, *args, share=True),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_random_graphs_detect_each_mutant(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    graphs = map(RandomGraph, range(150))
    assert not all(graph.agrees(graph.passes()) for graph in graphs)


# -- order


def test_a_reply_fires_before_the_send_that_it_answers_gets_its_gradient():
    graph, runs = Residual(), []
    graph.h.register_hook(square(runs))
    graph.reply.register_hook(square(runs))
    both = LocalPass(graph.roots)

    (fired,) = both.run_gradients("loss", [ONE])
    assert (fired.key, fired.grads, both.final_leaves(), both.is_complete) == ("reply", [100], [], False)

    assert both.run_gradients("send", [ONE]) == []
    assert runs == [10, 6 + 7] and both.is_complete
    assert both.final_leaves() == [(graph.weight, 2 * 13**2)] and graph.weight.grad is None


def test_a_pass_with_one_root_calls_torch_once(monkeypatch):
    calls = []
    run = regions._engine_run_backward
    monkeypatch.setattr(regions, "_engine_run_backward", lambda *args, **how: calls.append(args) or run(*args, **how))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    (x,) = attach_recv_node([torch.randn(2, 3).requires_grad_()], "x")
    y = model(x)
    want = torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y), retain_graph=True)

    local = LocalPass({"y": gradient_edges([y])})
    (fired,) = local.run_gradients("y", [torch.ones_like(y)])

    got = dict(local.final_leaves())
    assert len(calls) == 1
    assert same([*fired.grads, *(got[weight] for weight in model.parameters())], want)


def test_micro_batches_with_shared_weights_call_torch_once_each_and_once_for_the_sums(monkeypatch):
    calls = []
    run = regions._engine_run_backward
    monkeypatch.setattr(regions, "_engine_run_backward", lambda *args, **how: calls.append(args) or run(*args, **how))
    model = torch.nn.Linear(3, 3)
    outputs = [model(torch.randn(2, 3)) for _ in range(4)]
    local = LocalPass({key: gradient_edges([output]) for key, output in enumerate(outputs)})

    for key, output in enumerate(outputs):
        assert local.final_leaves() == []
        local.run_gradients(key, [torch.ones_like(output)])

    got = dict(local.final_leaves())
    assert len(calls) == 5
    assert same([got[model.bias]], [torch.full((3,), 8.0)])


# -- hooks of other kinds


def test_a_module_backward_hook_sees_the_whole_sum_once():
    module, seen = torch.nn.Linear(1, 1, bias=False).double(), []
    module.register_full_backward_hook(lambda _module, _below, above: seen.append(above[0].item()))
    h = module(number())
    local = LocalPass({"a": gradient_edges([h * 2]), "b": gradient_edges([h * 3])})

    assert local.run_gradients("a", [ONE]) == local.run_gradients("b", [ONE]) == [] and seen == [5]


def test_a_pass_does_not_set_grad_and_skips_frozen_leaves():
    graph, frozen = Residual(), number()
    output = graph.h * frozen
    frozen.requires_grad_(False)
    local = LocalPass({"loss": graph.roots["loss"], "output": gradient_edges([output])})
    local.run_gradients("loss", [ONE])
    local.run_gradients("output", [ONE])
    assert [leaf for leaf, _ in local.final_leaves()] == [graph.weight] and graph.weight.grad is frozen.grad is None


# -- kinds of gradients


@pytest.mark.parametrize("order", [["sparse", "dense"], ["dense", "sparse"]])
def test_sparse_and_dense_portions_add_up(order):
    table = torch.randn(4, 2).requires_grad_()
    rows = torch.tensor([1, 1, 3])
    roots = {"sparse": torch.nn.functional.embedding(rows, table, sparse=True), "dense": table * 2}
    local = LocalPass({key: gradient_edges([root]) for key, root in roots.items()})
    for key in order:
        local.run_gradients(key, [torch.ones_like(roots[key])])
    ((leaf, grad),) = local.final_leaves()
    assert leaf is table and torch.equal(grad.to_dense(), torch.tensor([[2.0] * 2, [4.0] * 2, [2.0] * 2, [3.0] * 2]))


def test_portions_of_several_dtypes_add_up_in_the_dtype_of_the_leaf():
    weight = number(dtype=torch.float32)
    h = weight * 2
    roots = [h * torch.full((1,), 3.0).double(), torch.complex(h, h).real, h * 5]
    local = LocalPass({key: gradient_edges([root]) for key, root in enumerate(roots)})
    for key, root in enumerate(roots):
        local.run_gradients(key, [torch.ones_like(root)])
    ((leaf, grad),) = local.final_leaves()
    assert leaf is weight and grad.dtype == torch.float32 and grad.item() == 2 * (3 + 1 + 5)


class Straight(torch.autograd.Function):
    """Gives its second argument no gradient."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_portion_can_be_none():
    weight, other = number(), number()
    h = weight * 2
    local = LocalPass({"straight": gradient_edges([Straight.apply(other, h)]), "h": gradient_edges([h * 3])})
    local.run_gradients("straight", [ONE])
    local.run_gradients("h", [ONE])
    assert local.final_leaves() == [(other, 1), (weight, 6)]


def test_missing_gradients_of_a_message_are_none():
    used, *_ = attach_recv_node([number(), ONE.clone(), torch.ones(2, 3).requires_grad_()], "m")
    (fired,) = LocalPass({"r": gradient_edges([used * 2])}).run_gradients("r", [ONE])
    assert fired.grads == [2, None, None]


def test_a_message_fires_even_if_all_its_gradients_are_none():
    (tensor,) = attach_recv_node([number()], "m")
    local = LocalPass({"a": gradient_edges([tensor * 2]), "b": gradient_edges([tensor * 3])})
    assert local.run_gradients("a", [None]) == []
    assert [fired.grads for fired in local.run_gradients("b", [None])] == [[None]]


# -- buffers


def test_buffers_are_freed_unless_the_graph_is_retained():
    graph = Residual()
    loss, other = graph.loss * graph.loss, graph.h * graph.h
    roots = {**graph.roots, "loss": gradient_edges([loss]), "other": gradient_edges([other])}
    saving = [loss.grad_fn, other.grad_fn, graph.h.grad_fn]
    for retain_graph in (True, True, False):
        assert all(node(ONE) for node in saving)
        local = LocalPass(roots, retain_graph)
        for key in roots:
            local.run_gradients(key, [ONE])
        assert [grad.item() for _, grad in local.final_leaves()] == [2 * (2 * graph.loss.item() * 6 + 7 + 4)]
    for node in saving:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            node(ONE)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        LocalPass(roots).run_gradients("loss", [ONE])


def above_the_cut(graph):
    """Return the node from which an edge leaves the region of the loss, towards `h`."""
    return graph.loss.grad_fn.next_functions[0][0]


def hooks_above_the_cut(graph):
    added = above_the_cut(graph).register_hook(lambda *_: None)
    count = len(added.hooks_dict_ref())
    added.remove()
    return count - 1


def test_a_pass_leaves_no_hooks_on_the_graph():
    graph, during = Residual(), []
    graph.reply.register_hook(lambda _: during.append(hooks_above_the_cut(graph)))
    local = LocalPass(graph.roots)
    for key in graph.roots:
        local.run_gradients(key, [ONE])
    assert during == [1] and hooks_above_the_cut(graph) == 0


# -- concurrent passes, and errors


def test_a_hook_can_run_a_backward_over_the_same_graph():
    graph, inner = Residual(), []

    def begin_others(*_grads):
        watch.remove()
        another = LocalPass(graph.roots, retain_graph=True)
        inner.extend(fired for key in graph.roots for fired in another.run_gradients(key, [ONE * 2]))
        inner.extend(another.final_leaves())
        inner.extend(torch.autograd.grad(graph.loss, graph.weight, ONE * 4, retain_graph=True))

    outer = LocalPass(graph.roots, retain_graph=True)
    watch = above_the_cut(graph).register_hook(begin_others)
    fired = [fired for key in graph.roots for fired in outer.run_gradients(key, [ONE])]

    assert fired[0].grads == [10] and outer.final_leaves() == [(graph.weight, 26)]
    assert inner[0].grads == [20] and inner[1:] == [(graph.weight, 52), 48]


def test_passes_on_several_threads_can_share_a_graph():
    graph = Residual()
    passes = {name: LocalPass(graph.roots, retain_graph=True) for name in "ab"}
    reached, go = ({name: threading.Event() for name in passes} for _ in range(2))

    def hold(_grad):
        name = threading.current_thread().name
        reached[name].set()
        assert go[name].wait(timeout=60)

    watch = graph.loss.register_hook(hold)
    threads = {
        name: threading.Thread(target=passes[name].run_gradients, args=("loss", [ONE * value]), name=name)
        for name, value in [("a", 1), ("b", 2)]
    }
    for name, thread in threads.items():
        thread.start()
        assert reached[name].wait(timeout=60)
    for name, thread in threads.items():
        go[name].set()
        thread.join(timeout=60)
    watch.remove()

    for one in passes.values():
        one.run_gradients("send", [ONE])
    assert [one.final_leaves() for one in passes.values()] == [
        [(graph.weight, 2 * (6 + 7))],
        [(graph.weight, 2 * (12 + 7))],
    ]


def test_an_error_in_a_hook_is_raised_and_leaves_the_graph_usable():
    graph = Residual()
    broken = graph.reply.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LocalPass(graph.roots, retain_graph=True).run_gradients("loss", [ONE])
    assert hooks_above_the_cut(graph) == 0
    broken.remove()
    assert [fired.grads for fired in LocalPass(graph.roots).run_gradients("loss", [ONE])] == [[10]]


def test_unexpected_gradients_are_refused():
    local = LocalPass(Residual().roots)
    local.run_gradients("loss", [ONE])
    for key, grads in [("loss", [ONE]), ("stranger", [ONE]), ("send", [ONE, ONE])]:
        with pytest.raises(ProtocolError, match=key):
            local.run_gradients(key, grads)
    assert not local.is_complete
