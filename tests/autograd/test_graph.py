"""Received tensors in the graph, and searches of the graph."""

from __future__ import annotations

import pytest
import torch

from rpcbench.autograd.graph import (
    Reach,
    attach_recv_node,
    find_ends,
    find_ends_within,
    gradient_edges,
    is_leaf,
    is_recv,
    leaf_of,
)
from rpcbench.base.errors import RpcError


class Marked(torch.Tensor):
    pass


def arrived(*shape):
    return torch.ones(*shape or (3,)).requires_grad_()


def test_the_tensors_of_one_message_share_one_node_with_its_key():
    first, plain, second = attach_recv_node([arrived(2), torch.ones(1), arrived(4)], (7, 1))

    assert first.grad_fn is second.grad_fn and first.grad_fn.key == (7, 1)
    assert is_recv(first.grad_fn) and not is_recv((first * 2).grad_fn)
    assert plain.grad_fn is None and not plain.requires_grad
    assert first.grad_fn.wanted == (True, False, True)


def test_received_tensors_stay_the_same_objects_of_the_same_class():
    tensors = [torch.nn.Parameter(torch.ones(2)), torch.Tensor._make_subclass(Marked, torch.ones(2)).requires_grad_()]
    tensors[1].note = "kept"

    received = attach_recv_node(tensors, 0)

    assert all(after is before for after, before in zip(received, tensors, strict=True))
    assert [type(tensor) for tensor in received] == [torch.nn.Parameter, Marked] and received[1].note == "kept"
    assert not any(tensor.is_leaf for tensor in received)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_received_tensors_can_be_changed_in_place(dtype):
    first, second = attach_recv_node([torch.ones(3, dtype=dtype).requires_grad_() for _ in range(2)], 0)
    node = first.grad_fn

    first.mul_(second)
    second[0] = 5
    first.view(1, 3)[0, :1].add_(1)

    assert (
        node in Reach(gradient_edges([first])).recvs.values() and node in Reach(gradient_edges([second])).recvs.values()
    )


@pytest.mark.parametrize("kind", [torch.Tensor, Marked])
def test_a_received_view_is_replaced_by_a_tensor_that_can_be_changed_in_place(kind):
    view = torch.ones(6)[:3].as_subclass(kind).requires_grad_()
    view.note = "kept"
    assert view._is_view()

    first, second = attach_recv_node([view, arrived()], 0)

    assert type(first) is kind and (kind is torch.Tensor or first.note == "kept")
    assert is_recv(first.grad_fn) and first.grad_fn is second.grad_fn
    assert torch.equal(first.mul_(2), torch.full((3,), 2.0))


def test_a_tensor_that_is_twice_in_a_message_collects_gradients_once():
    tensor = arrived()

    first, second = attach_recv_node([tensor, tensor], 0)

    assert first is second is tensor
    assert first.grad_fn.wanted == (True, False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_received_tensors_are_recorded_in_any_grad_mode_of_the_receiving_thread(mode):
    tensor = arrived()
    with mode():
        attach_recv_node([tensor], 0)
    assert is_recv(tensor.grad_fn)


def test_a_local_backward_through_a_received_tensor_fails_with_advice():
    (tensor,) = attach_recv_node([arrived()], (7, 1))
    with pytest.raises(RpcError, match=r"\(7, 1\).*rpcbench.autograd.backward"):
        tensor.sum().backward()


def test_edges_are_none_for_tensors_that_require_no_grad():
    leaf = arrived()
    inner = leaf * 2

    of_leaf, nothing, of_inner = gradient_edges([leaf, torch.ones(1), inner])

    assert nothing is None and of_inner.node is inner.grad_fn
    assert is_leaf(of_leaf.node) and leaf_of(of_leaf.node) is leaf


def test_reach_finds_leaves_and_messages_and_stops_there():
    weight, unused = arrived(), arrived()
    (first, _), (other,) = attach_recv_node([arrived(), arrived()], "m1"), attach_recv_node([arrived()], "m2")

    found = Reach(gradient_edges([first * weight + weight, torch.ones(1)]))

    assert list(found.recvs) == ["m1"] and [leaf_of(node) for node in found.leaves] == [weight]
    found = Reach(gradient_edges([first * weight + weight, first * other, other * unused, other]))
    assert list(found.recvs) == ["m1", "m2"] and {leaf_of(node) for node in found.leaves} == {weight, unused}


def test_reach_lists_each_node_once_after_all_nodes_below_it():
    torch.manual_seed(0)
    pool = [arrived(), *attach_recv_node([arrived()], "m")]
    for _ in range(200):
        a, b = (pool[i] for i in torch.randint(len(pool), (2,)))
        pool.append(a * b)
    found = Reach(gradient_edges([pool[i] for i in torch.randperm(len(pool))[:50]]))

    place = {node: number for number, node in enumerate(found.below)}

    assert all(place[child] < place[node] for node, below in found.below.items() for child, _ in below)


def test_a_deep_graph_is_searched_without_recursion():
    (tensor,) = attach_recv_node([arrived()], "m")
    for _ in range(20_000):
        tensor = tensor * 1
    found = Reach(gradient_edges([tensor]))
    assert len(found.below) == 20_001 and list(found.recvs) == ["m"]


def test_ends_equal_those_of_a_full_search_each_once() -> None:
    weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    received = attach_recv_node([torch.ones(2).requires_grad_()], "key")[0]
    sent = [received * weight, weight + 0.5, other.detach(), received, weight, weight]
    for _ in range(16):  # if both edges to a node were followed, each round would double the work
        sent[0] = sent[0] * sent[0] + sent[1]
    found, all_of_it = find_ends(gradient_edges(sent)), Reach(gradient_edges(sent))
    assert found.recvs == all_of_it.recvs and [*found.recvs] == ["key"]
    assert [leaf_of(node) for node in found.leaves] == [weight]
    assert {*found.terminal_nodes} == {*all_of_it.terminal_nodes}


def test_ends_come_in_the_order_of_the_sent_tensors() -> None:
    sent = [torch.ones(2, requires_grad=True) for _ in range(5)]
    assert all(leaf_of(node) is leaf for node, leaf in zip(find_ends(gradient_edges(sent)).leaves, sent, strict=True))


def test_ends_within_returns_none_beyond_its_limit_of_nodes() -> None:
    weight = torch.ones(2, requires_grad=True)
    sent = gradient_edges([((weight * 2) * 2) * 2])
    assert find_ends_within(sent, 2) is None
    found = find_ends_within(sent, 5)
    assert found is not None and [leaf_of(node) for node in found.leaves] == [weight]
    assert find_ends_within([None], 0) is not None
