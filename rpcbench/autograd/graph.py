"""The cuts in torch's graph at messages (a recv node and a send node), and searches of the graph between them.

    leaves ──> local graph ──> SendRpc ~~ message ~~> RecvRpc ──> local graph of the receiver ──> root

Guarantees
- The tensors of a received message are the outputs of one node. They are no leaves, so they may be changed in place.
- The tensors of a sent message, of any layout, are the inputs of one node, which keeps their graph alive.
- `Reach` visits every node once, however many edges lead to it, and without recursion: graphs may be deep.
- A search ends at leaves and at received tensors. Nothing here runs a node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from rpcbench.base.errors import RpcError

Below = tuple[tuple[Node | None, int], ...]
edge_of: Callable[[tuple[Any, int, Any]], GradientEdge] = partial(tuple.__new__, GradientEdge)  # `_make`, but in C


class RecvRpc(torch.autograd.Function):
    """The node behind the tensors of one received message: a distributed backward collects there and never runs it."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, key: Hashable, wanted: Sequence[bool], *tensors: Tensor) -> Any:
        ctx.key = key
        ctx.wanted = tuple(wanted)  # for each place in the message: it gets a gradient
        ctx.mark_dirty(*tensors)  # the outputs are the same objects, not views of the inputs
        return tensors

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        raise RpcError(
            f"A local backward reached a tensor that was received from another worker (message {ctx.key}). "
            "Its gradient belongs to the sender: call rpcbench.autograd.backward(context_id, roots) instead."
        )


class SendRpc(torch.autograd.Function):
    """The node above the tensors of one sent message. Its output is a stand-in for the message, without elements."""

    @staticmethod
    def forward(_ctx: Any, *_tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        raise RpcError("A send node holds a sent message's place in the graph; gradients enter below it.")


for _kind in (RecvRpc, SendRpc):  # the names of torch's own nodes: its graphs show them, and programs look for them
    _kind._backward_cls.__name__ = f"torch::distributed::autograd::{_kind.__name__}Backward"


def _apply_recorded(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function with grad mode enabled: torch, too, records messages in every mode."""
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        plain: Any = super(torch.autograd.Function, function)
        return plain.apply(*args)  # leaves out a Function's work for transforms such as vmap
    with torch.inference_mode(False), torch.enable_grad():
        return function.apply(*args)  # type: ignore[no-untyped-call]


def attach_recv_node(tensors: Sequence[Tensor], key: Hashable) -> list[Tensor]:
    """Make the tensors of a message that require grad the outputs of one recv node with this `key`; return all tensors.
    They stay the same objects, except views. A tensor that is there twice gets its gradient at its first place."""
    received, outputs = list(tensors), []
    wanted: list[bool] = []
    for place, tensor in enumerate(tensors):
        wanted.append(tensor.requires_grad)
        if tensor.requires_grad:
            received[place] = _no_view(tensor).requires_grad_(False)
            outputs.append(received[place])
    if outputs:
        _apply_recorded(RecvRpc, torch.empty(0, requires_grad=True), key, wanted, *outputs)
    return received


def _no_view(tensor: Tensor) -> Tensor:
    """Return the tensor, or if it is a view, a detached tensor of its class on the same memory."""
    # torch refuses in-place changes of a view that is one of several outputs of a node.
    if not tensor._is_view():
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        if type(tensor) is Tensor:
            return plain
        own: Tensor = Tensor._make_subclass(type(tensor), plain)
    own.__dict__.update(tensor.__dict__)
    return own


def gradient_edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Return the edge at which each tensor's gradient will enter the graph, None for tensors without a gradient."""
    recorded = [tensor for tensor in tensors if tensor.requires_grad]
    if not recorded:
        return [None] * len(tensors)
    message = _apply_recorded(SendRpc, *recorded)  # every edge refers to this stand-in, and so keeps the graph alive
    below = iter(message.grad_fn.next_functions)
    return [edge_of((*next(below), message)) if tensor.requires_grad else None for tensor in tensors]


def send_node(edges: Iterable[GradientEdge | None]) -> Any:
    """Return the node above the tensors of a sent message."""
    message: Any = next(edge.ownership_token for edge in edges if edge is not None)
    return message.grad_fn


_LEAF: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_RECV: type = RecvRpc._backward_cls


def is_leaf(node: Node) -> bool:
    return type(node) is _LEAF


def leaf_of(node: Any) -> Tensor:
    leaf: Tensor = node.variable
    return leaf


def is_recv(node: Node) -> bool:
    return type(node) is _RECV


@dataclass(slots=True, eq=False)
class Ends:
    """The nodes at which the gradients of some edges end."""

    recvs: dict[Any, Any]  # key of a received message → its node
    leaves: list[Any]  # AccumulateGrad nodes

    @property
    def terminal_nodes(self) -> list[Any]:
        """Return all these nodes."""
        return [*self.leaves, *self.recvs.values()]


class Reach(Ends):
    """All nodes that some edges lead to. `below` maps each node to its children, and has the children first."""

    __slots__ = ("below",)

    def __init__(self, edges: Iterable[GradientEdge | None]) -> None:
        super().__init__({}, [])
        self.below: dict[Node, Below] = {}
        for edge in edges:
            if edge is not None:
                self._visit_below(edge.node)

    def _visit_below(self, start: Any) -> None:
        # A depth-first search with a stack of its own. A node is seen twice: it is `entered` before its children, and
        # put into `below` after them.
        below = self.below
        entered: dict[Node, Below] = {}
        stack = [start]
        while stack:
            node, kind = stack[-1], type(stack[-1])
            if node in below:
                stack.pop()
            elif node in entered:
                below[node] = entered[node]
                stack.pop()
            elif kind is _RECV:
                self.recvs[node.key] = node
                entered[node] = ()
            else:
                if kind is _LEAF:
                    self.leaves.append(node)
                entered[node] = node.next_functions
                stack += [child for child, _ in entered[node] if child is not None]


def find_ends(edges: Iterable[GradientEdge | None]) -> Ends:
    """Return the nodes at which the gradients of these edges end."""
    found = find_ends_within(edges, sys.maxsize)
    assert found is not None
    return found


def find_ends_within(edges: Iterable[GradientEdge | None], most: int) -> Ends | None:
    """Do as `find_ends`, but return None if there are more than `most` nodes, which limits the time."""
    nodes: list[Any] = [*dict.fromkeys([edge.node for edge in edges if edge is not None])]
    seen = {None, *nodes}
    recvs: dict[Any, Any] = {}
    leaves: list[Any] = []
    for node in nodes:  # the loop appends to this list: a breadth-first search
        kind = type(node)
        if kind is _LEAF:
            leaves.append(node)
        elif kind is _RECV:
            recvs[node.key] = node
        else:
            for child, _ in node.next_functions:
                if child not in seen:
                    seen.add(child)
                    nodes.append(child)
            if len(nodes) > most:
                return None
    return Ends(recvs, leaves)
