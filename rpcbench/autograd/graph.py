"""Where torch's graph is cut: the tensors of a received message, the edges of a sent one, and what lies between.

Guarantees
- The tensors of one received message are the outputs of one node; they are no leaves, so they may be changed in place.
- The tensors of one sent message are the inputs of one node, whatever their layout; it keeps their graph alive.
- `Reach` looks at every node once, however many edges lead there, and without recursion: graphs may be deep.
- A walk ends at leaves and at received tensors. Nothing here runs a node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from rpcbench.base.errors import RpcError

Below = tuple[tuple[Node | None, int], ...]
edge_of: Callable[[tuple[Any, int, Any]], GradientEdge] = partial(tuple.__new__, GradientEdge)  # as `_make`, in C


class RecvRpc(torch.autograd.Function):
    """The node behind the tensors of one received message; a distributed backward collects there and never runs it.

    Its context, which is the node, has `key` and, for each place in the message, whether a gradient goes back there.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, key: Hashable, wanted: Sequence[bool], *tensors: Tensor) -> Any:
        ctx.key = key
        ctx.wanted = tuple(wanted)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        raise RpcError(
            f"A local backward reached a tensor that was received from another worker (message {ctx.key}). "
            "Its gradient belongs to the sender: call rpcbench.autograd.backward(context_id, roots) instead."
        )


class SendRpc(torch.autograd.Function):
    """The node above the tensors of one sent message. Its output has no elements, and stands for the message."""

    @staticmethod
    def forward(_ctx: Any, *_tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        raise RpcError("A send node holds a sent message's place in the graph; gradients enter below it.")


for _kind in (RecvRpc, SendRpc):  # the names of torch's own nodes, which its graphs show and programs look for
    _kind._backward_cls.__name__ = f"torch::distributed::autograd::{_kind.__name__}Backward"


def _recorded(function: type[torch.autograd.Function], *args: Any) -> Any:
    """What travels is recorded whatever mode the thread is in, as torch does it."""
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        plain: Any = super(torch.autograd.Function, function)
        return plain.apply(*args)  # all but what a Function does for transforms
    with torch.inference_mode(False), torch.enable_grad():
        return function.apply(*args)  # type: ignore[no-untyped-call]


def receive(tensors: Sequence[Tensor], key: Hashable) -> list[Tensor]:
    """Make those tensors of a message that require grad outputs of one recv node that carries `key`.

    They stay the same objects, of the same class, unless one is a view: a view is replaced. A tensor that stands in the
    message twice collects its gradient in the first place. The others are returned as they are.
    """
    received, outputs = list(tensors), []
    wanted: list[bool] = []
    for place, tensor in enumerate(tensors):
        wanted.append(tensor.requires_grad)
        if tensor.requires_grad:
            received[place] = _no_view(tensor).requires_grad_(False)
            outputs.append(received[place])
    if outputs:
        _recorded(RecvRpc, torch.empty(0, requires_grad=True), key, wanted, *outputs)
    return received


def _no_view(tensor: Tensor) -> Tensor:
    """The tensor, or one in its place: torch refuses in-place changes of views that leave a node side by side."""
    if not tensor._is_view():
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        if type(tensor) is Tensor:
            return plain
        own: Tensor = Tensor._make_subclass(type(tensor), plain)
    own.__dict__.update(tensor.__dict__)
    return own


def edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """For each tensor of a message about to be sent: where its gradient will enter the graph, None if nowhere.

    Every edge holds the message's stand-in, and with it the graph.
    """
    recorded = [tensor for tensor in tensors if tensor.requires_grad]
    if not recorded:
        return [None] * len(tensors)
    message = _recorded(SendRpc, *recorded)
    below = iter(message.grad_fn.next_functions)
    return [edge_of((*next(below), message)) if tensor.requires_grad else None for tensor in tensors]


def root_edges(roots: Sequence[Tensor]) -> list[GradientEdge | None]:
    """As `edges`, for what a backward pass begins at: nothing stands for them but themselves."""
    return [edge_of((root.grad_fn, root.output_nr, root)) for root in roots]


def send_node(edges: Iterable[GradientEdge | None]) -> Any:
    """The node above the tensors of a sent message."""
    message: Any = next(edge.ownership_token for edge in edges if edge is not None)
    return message.grad_fn


_LEAF: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_RECV: type = RecvRpc._backward_cls


def is_leaf(node: Node) -> bool:
    """Whether the node stands for a tensor whose gradient is kept."""
    return type(node) is _LEAF


def leaf_of(node: Any) -> Tensor:
    """The tensor that a leaf's node stands for."""
    leaf: Tensor = node.variable
    return leaf


def is_recv(node: Node) -> bool:
    """Whether the node stands for a received message."""
    return type(node) is _RECV


class Ends:
    """Where the gradients of some edges end.

    `recvs` maps the keys of the received messages that are reached to their nodes; `leaves` lists the nodes of leaf
    tensors.
    """

    __slots__ = ("leaves", "recvs")

    def __init__(self, recvs: dict[Any, Any], leaves: list[Any]) -> None:
        self.recvs = recvs
        self.leaves = leaves

    @property
    def terminals(self) -> list[Any]:
        """The nodes at which gradients end."""
        return [*self.leaves, *self.recvs.values()]


class Reach(Ends):
    """What some edges lead to: `below` maps each node to what it leads to; each comes after everything it leads to."""

    __slots__ = ("below",)

    def __init__(self, edges: Iterable[GradientEdge | None]) -> None:
        super().__init__({}, [])
        self.below: dict[Node, Below] = {}
        for edge in edges:
            if edge is not None:
                self._walk(edge.node)

    def _walk(self, start: Node) -> None:
        below = self.below
        entered: dict[Node, Below] = {}
        stack = [start]
        while stack:
            node = stack[-1]
            if node in below:
                stack.pop()
            elif node in entered:
                below[node] = entered[node]
                stack.pop()
            else:
                entered[node] = self._enter(node)
                stack += [child for child, _ in entered[node] if child is not None]

    def _enter(self, node: Any) -> Below:
        kind = type(node)
        if kind is _RECV:
            self.recvs[node.key] = node
            return ()
        if kind is _LEAF:
            self.leaves.append(node)
        below: Below = node.next_functions
        return below


def ends(edges: Iterable[GradientEdge | None]) -> Ends:
    """Where the gradients of these edges end."""
    found = glance(edges, sys.maxsize)
    assert found is not None
    return found


def glance(edges: Iterable[GradientEdge | None], most: int) -> Ends | None:
    """As `ends`, unless looking takes long: None where there are more than `most` nodes."""
    nodes: list[Any] = [*dict.fromkeys([edge.node for edge in edges if edge is not None])]
    seen = {None, *nodes}
    recvs: dict[Any, Any] = {}
    leaves: list[Any] = []
    for node in nodes:  # which become more meanwhile
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
