"""Where torch's graph is cut: the tensors of a received message, the edges of a sent one, and what lies between.

Guarantees
- The tensors of one received message are the outputs of one node; they are no leaves, so they may be changed in place.
- `Reach` looks at every node once, however many edges are added, and without recursion: graphs may be deep.
- A walk ends at leaves and at received tensors. Nothing here runs a node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from rpcbench.words.errors import RpcError

Below = tuple[tuple[Node | None, int], ...]


class Blank(NamedTuple):
    """What a gradient of zeros looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class RecvRpc(torch.autograd.Function):
    """The node behind the tensors of one received message; a distributed backward collects there and never runs it.

    Its context, which is the node, has `key` and, for each place in the message, a `Blank` where a gradient goes back.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, key: Hashable, blanks: Sequence[Blank | None], *tensors: Tensor) -> Any:
        ctx.key = key
        ctx.blanks = tuple(blanks)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        raise RpcError(
            f"A local backward reached a tensor that was received from another worker (message {ctx.key}). "
            "Its gradient belongs to the sender: call rpcbench.autograd.backward(context_id, roots) instead."
        )


def receive(tensors: Sequence[Tensor], key: Hashable) -> list[Tensor]:
    """Make those tensors of a message that require grad outputs of one recv node that carries `key`.

    They stay the same objects, of the same class, unless one is a view: a view is replaced. A tensor that stands in the
    message twice collects its gradient in the first place. The others are returned as they are.
    """
    received, outputs = list(tensors), []
    blanks: list[Blank | None] = []
    for place, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            blanks.append(None)
            continue
        output = received[place] = _no_view(tensor).requires_grad_(False)
        outputs.append(output)
        blanks.append(Blank(output.shape, output.dtype, output.device))
    if outputs:
        with torch.inference_mode(False), torch.enable_grad():
            RecvRpc.apply(torch.empty(0, requires_grad=True), key, blanks, *outputs)  # type: ignore[no-untyped-call]
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


def edges(tensors: Iterable[Tensor]) -> list[GradientEdge | None]:
    """For each tensor of a message about to be sent: where its gradient will enter the graph, None if nowhere."""
    return [_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def _edge(tensor: Tensor) -> GradientEdge:
    if tensor.grad_fn is None and tensor.layout is not torch.strided:
        with torch.enable_grad():  # torch asks a view for its leaf, and a sparse tensor has no views
            copy: Any = tensor.clone()
        return GradientEdge(copy.grad_fn.next_functions[0][0], 0)
    return get_gradient_edge(tensor)


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


class Reach:
    """What a growing set of edges leads to.

    `below` maps each node to what it leads to; a node comes after everything it leads to. `recvs` maps the keys of the
    received messages that were reached to their nodes; `leaves` lists the nodes of leaf tensors.
    """

    def __init__(self) -> None:
        self.below: dict[Node, Below] = {}
        self.recvs: dict[Any, Any] = {}
        self.leaves: list[Any] = []

    def add(self, edges: Iterable[GradientEdge | None]) -> list[Any]:
        """Walk on from more edges; returns the keys of the received messages that were not reached before."""
        known = len(self.recvs)
        for edge in edges:
            if edge is not None:
                self._walk(edge.node)
        return list(self.recvs)[known:]

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


def reach(edges: Iterable[GradientEdge | None]) -> Reach:
    """What these edges lead to."""
    found = Reach()
    found.add(edges)
    return found
