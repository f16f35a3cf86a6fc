"""One worker's part of a backward pass, run region by region as the gradients of its roots arrive, in any order.

Guarantees
- The gradients are those of one local backward from all roots. A pass with one root is one `torch.autograd.grad`.
- No tensor's `.grad` is changed. Hooks of tensors and nodes run, except those that belong to writing `.grad`:
  `register_post_accumulate_grad_hook`, and hooks on the AccumulateGrad nodes of leaves.
- Without `retain_graph` the buffers of a node are freed after it has run.
- An edge between two regions without a gradient is not followed. Hooks that count by torch's backward, such as
  `register_multi_grad_hook`, count each region separately. A `Node.register_hook` on a node with tapped edges sees
  None for these, as in any backward that does not ask for them.

Rules
- One thread at a time calls one pass. Several passes may run over one graph at once: each run takes its own gradients.
- Returned gradients may share memory with each other and with the given ones: no caller may change them in place.
"""

# Theory of operation
# A root is a place where gradients enter: a local loss, or a message that was sent. A region is the set of nodes that
# the same roots lead to. It runs once, after all these roots have arrived, so each node gets the complete sum of its
# gradients, and each hook runs once.
#
#     roots     A       B          A leads to a, c and d; B leads to b, c and d. There are three regions: {a} runs after
#              / \     / \         A has arrived, {b} after B, {c, d} after both. The portions that a and b contribute
#             a    c─┬─    b       to c are taken off their edges at the near end (a tap), and summed until {c, d} runs.
#                    d
#
# Gradients move only to regions that are later in the order. Roots without a common leaf or received message are not
# divided: each is one region.
# Ends. A region hands its gradients out at its ends, after the tensor hooks there: at leaf and recv nodes that no other
# region feeds. A leaf without hooks may be an end of several regions, unless one of them leads on to nodes of others:
# those may lead to the same leaf, and torch's engine would continue to it through them. Every other edge that leaves a
# region is tapped.
# Taps. A portion is taken by a hook that runs after the node at the near end. If torch's engine captured it at the far
# end, it would run the hooks of that node on the portion instead of the complete sum. A built-in node computes only the
# gradients that the running backward asks for, and none asks for a tapped edge. So the tap calls the node once more,
# inside a backward of one scalar that asks for these edges alone and never reaches them.

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from rpcbench.autograd.gradients import sum_gradients
from rpcbench.autograd.graph import Below, Ends, Reach, edge_of, find_ends, is_leaf, is_recv, leaf_of
from rpcbench.base.errors import ProtocolError, count_noun

Grads = Sequence["Tensor | None"]
Portions = list[tuple[GradientEdge, "Tensor | None"]]
Taps = Mapping[Any, Sequence[tuple[int, GradientEdge]]]
Spans = dict[int, list[float]]
"""Bit set of the roots of regions → when they began to run, and when they had run."""

_RUN = "rpcbench.autograd.regions.run"  # key in torch's thread-local storage


def run_tapped(
    starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], taps: Taps, retain_graph: bool
) -> tuple[Grads, Portions]:
    """Run backward from `starts`; return the gradients at `end_edges`, after tensor hooks, and on the tapped edges."""
    if not taps:
        return _compute_gradients(starts, ends, retain_graph), []
    taken: dict[int, Portions] = {}
    handles = [node.register_hook(partial(_note_tapped, node, edges, taken)) for node, edges in taps.items()]
    try:
        with _identify_backwards(taken):
            grads: Grads = ()
            if ends:
                grads = _compute_gradients(starts, ends, retain_graph)
            else:
                # The engine needs a goal: let it run to the tapped nodes themselves.
                inputs = [GradientEdge(node, 0) for node in taps]
                torch.autograd.backward(list(starts), list(starts.values()), retain_graph, inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    return grads, (taken[min(taken)] if taken else [])


@contextlib.contextmanager
def _identify_backwards(taken: object) -> Iterator[None]:
    """Identify the backwards that begin in this block: torch copies `taken` to the threads of its engine."""
    # A node may have the hooks of several passes at once; each tap must ignore the runs of the others.
    outer = torch._C._get_obj_in_tls(_RUN) if torch._C._is_key_in_tls(_RUN) else None
    torch._C._stash_obj_in_tls(_RUN, taken)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_RUN, outer)


def _compute_gradients(
    starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], retain_graph: bool
) -> Grads:
    """Do as `torch.autograd.grad` without its argument checks, which take a third of the time of a small backward."""
    return _engine_run_backward(
        tuple(starts),
        tuple(starts.values()),
        retain_graph,
        False,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def _note_tapped(
    node: Any, edges: Sequence[tuple[int, GradientEdge]], taken: dict[int, Portions], down: Grads, up: Grads
) -> None:
    """Note the gradients on the tapped edges of `node`, after it has run in a backward of this pass."""
    if not torch._C._is_key_in_tls(_RUN) or torch._C._get_obj_in_tls(_RUN) is not taken:
        return
    if not is_in_python(node) and any(down[place] is None for place, _ in edges):
        (down,) = compute_apart([(node, up)], [target for _, target in edges])
    portions = taken.setdefault(torch._C._current_graph_task_id(), [])
    portions += [(target, _sum_to_target(down[place], target)) for place, target in edges]


def is_in_python(node: Any) -> bool:
    """Return whether a node is a Function in Python: it computes all gradients; others only those asked for."""
    return isinstance(node, torch._C._FunctionBase)


def compute_apart(ran: Iterable[tuple[Any, Grads]], targets: Sequence[GradientEdge]) -> list[Grads]:
    """Call built-in nodes that have run in a backward once more, each with the gradients that arrived there, without
    its hooks. Return the gradients that they compute for the edges to `targets`, in the places of all their edges."""
    results: list[Any] = []
    scalar = torch.zeros((), requires_grad=True)
    scalar.register_hook(lambda _: results.extend(node(*up) for node, up in ran))  # type: ignore[no-untyped-call]
    inputs: list[Any] = [scalar, *targets]
    torch.autograd.grad(scalar, inputs, scalar, allow_unused=True)
    return [result if isinstance(result, tuple) else (result,) for result in results]


def _sum_to_target(grad: Tensor | None, target: GradientEdge) -> Tensor | None:
    """Sum the gradient over broadcast dimensions, which torch's engine does after the hooks of a node."""
    if grad is None:
        return None
    shape = torch.Size(target.node._input_metadata[target.output_nr].shape)
    return grad if grad.shape == shape else grad.sum_to_size(shape)


RootEdges = Sequence["GradientEdge | None"]


class Region:
    """Nodes that run together, in one backward of torch's engine."""

    __slots__ = ("entries", "leaves", "recvs", "roots", "shared", "sums", "taps")

    def __init__(self, roots: int, leaves: list[Any], recvs: list[Any]) -> None:
        self.roots = roots  # bit set of the roots that lead here
        self.leaves = leaves
        self.recvs = recvs
        self.shared: dict[GradientEdge, None] = {}  # leaves without hooks, of other regions: ends for a portion
        self.taps: dict[Any, list[tuple[int, GradientEdge]]] = {}  # node → (place, target) of its tapped edges
        self.entries: dict[GradientEdge, Tensor] = {}  # gradients that have entered so far
        self.sums: set[GradientEdge] = set()  # entries that are sums made here, so they may be changed in place

    def end_edges(self) -> list[GradientEdge]:
        """Return the ends: the leaves, one edge for each tensor of the recvs, and the shared leaves."""
        leaves = map(edge_of, zip(self.leaves, repeat(0), repeat(None)))
        recvs = [GradientEdge(recv, number) for recv in self.recvs for number in range(sum(recv.wanted))]
        return [*leaves, *recvs, *self.shared]

    def add_gradient(self, edge: GradientEdge, grad: Tensor) -> None:
        """Add a gradient that enters by this edge."""
        before = self.entries.get(edge)
        if before is None:
            self.entries[edge] = grad
        elif edge in self.sums and before.layout is torch.strided:
            before += grad
        else:
            self.entries[edge] = sum_gradients(before, grad)
            self.sums.add(edge)


class RegionOrder:
    """All regions, in an order in which they can run, and the region of each node where gradients may enter."""

    def __init__(self, roots: Sequence[RootEdges], found: Sequence[Ends] = ()) -> None:
        self.part_of: dict[Any, Region] = {}
        # `found` has the ends of all roots, or is empty. It takes far less time than `Reach`, which maps every node.
        if len(roots) == 1 and not found:
            found = [find_ends(roots[0])]
        if found and _is_disjoint(found):
            self.parts = [self._make_whole_region(*one) for one in zip(range(len(roots)), roots, found, strict=True)]
            return
        self._parts: dict[tuple[int, bool], Region] = {}
        together = Reach(chain.from_iterable(roots))
        self._divide_nodes(_roots_by_node(roots, together), together)
        # Each step down the graph can only add roots, so fewer roots come first; then a front before its rest.
        order = sorted(self._parts, key=lambda key: (key[0].bit_count(), *key))
        self.parts = [self._parts[key] for key in order]

    def _region_of_roots(self, roots: int, rest: bool) -> Region:
        """Return the front region of a set of roots, or its rest: nodes that lead only to other regions."""
        part = self._parts.get((roots, rest))
        if part is None:
            part = self._parts[roots, rest] = Region(roots, [], [])
        return part

    def _make_whole_region(self, number: int, root: RootEdges, found: Ends) -> Region:
        part = Region(1 << number, found.leaves, [*found.recvs.values()])
        for edge in root:
            if edge is not None:
                self.part_of[edge.node] = part
        return part

    def _divide_nodes(self, bits: dict[Any, int], found: Reach) -> None:
        # Sets of roots with an inner edge to another set: their regions may not share leaves (see "Ends" above).
        leading_on = {
            bits[node]
            for node, below in found.below.items()
            for child, _ in below
            if child is not None and bits[child] != bits[node] and not _is_terminal(child)
        }
        for node, below in found.below.items():
            roots = bits[node]
            if _is_terminal(node):
                part = self.part_of[node] = self._region_of_roots(roots, False)
                (part.leaves if is_leaf(node) else part.recvs).append(node)
            else:
                self._place_node(node, below, roots, share=roots not in leading_on)

    def _place_node(self, node: Any, below: Below, roots: int, share: bool) -> None:
        """Put an inner node into its region; its children are in place already."""
        front = self._region_of_roots(roots, False)
        child_regions = []
        for child, number in below:
            child_region = self.part_of.get(child)
            if share and child_region is not front and child is not None and _is_bare_leaf(child):
                child_region = front
                front.shared[GradientEdge(child, number)] = None
            child_regions.append(child_region)
        if front in child_regions:
            mine = front
        elif any(child_regions):
            mine = self._region_of_roots(roots, True)
        else:
            return  # it leads to no end, so no gradient that passes it is needed
        self.part_of[node] = mine
        away = [
            (place, GradientEdge(child, number))
            for place, (child, number) in enumerate(below)
            if child is not None and child_regions[place] not in (None, mine)
        ]
        if away:
            mine.taps[node] = away


def _is_disjoint(found: Sequence[Ends]) -> bool:
    """Return whether no two roots lead to the same leaf or received message."""
    seen: set[Any] = set()
    for one in found:
        if not seen.isdisjoint(terminals := one.terminal_nodes):
            return False
        seen.update(terminals)
    return True


def _roots_by_node(roots: Sequence[RootEdges], found: Reach) -> dict[Any, int]:
    """Return for each node the bit set of the roots that lead to it."""
    bits: dict[Any, int] = dict.fromkeys(found.below, 0)
    for number, root in enumerate(roots):
        for edge in root:
            if edge is not None:
                bits[edge.node] |= 1 << number
    for node in reversed(found.below):  # parents before children
        here = bits[node]
        for child, _ in found.below[node]:
            if child is not None:
                bits[child] |= here
    return bits


def _is_terminal(node: Any) -> bool:
    return is_leaf(node) or is_recv(node)


def _is_bare_leaf(node: Any) -> bool:
    return is_leaf(node) and not leaf_of(node)._backward_hooks


class Fired(NamedTuple):
    """The final gradients of one received message, one for each place in it; None where no gradient came."""

    key: Any
    grads: list[Tensor | None]


class LocalPass:
    """One backward pass over this worker's part of the graph, from the edges of all roots that take part.
    `found` has the ends of each root, in the order of `roots`, or is empty."""

    def __init__(
        self,
        roots: Mapping[Any, Sequence[GradientEdge | None]],
        retain_graph: bool = False,
        found: Sequence[Ends] = (),
    ) -> None:
        self._roots = roots  # keeps the graph alive, too
        self._retain_graph = retain_graph
        self._bits = {key: 1 << number for number, key in enumerate(roots)}
        self._missing = (1 << len(roots)) - 1  # bit set of the roots that have not arrived
        self._leaves: list[tuple[Any, Tensor | None]] = []  # node, final gradient
        plan = RegionOrder(list(roots.values()), found)
        self._part_of, self._waiting = plan.part_of, plan.parts
        self.regions, self.ran = len(plan.parts), 0
        self.spans: Spans | None = None  # noted only while somebody watches

    @property
    def is_complete(self) -> bool:
        """Return whether all roots have arrived, so all regions have run."""
        return not self._missing

    def final_leaves(self) -> list[tuple[Tensor, Tensor]]:
        """Return the leaf tensors that have their final gradients, with these; all leaves when complete."""
        return [
            (leaf, grad) for node, grad in self._leaves if grad is not None and (leaf := node.variable).requires_grad
        ]

    def run_gradients(self, key: Hashable, grads: Sequence[Tensor | None]) -> list[Fired]:
        """Take the gradients of one root, run the regions that they complete, and return the gradients to be sent.
        Errors of user code propagate; the pass is then over. ProtocolError for a wrong root or number of gradients."""
        bit = self._bits.get(key, 0)
        if not bit & self._missing:
            raise ProtocolError(f"gradients came for {key}, which this backward pass does not wait for")
        edges = self._roots[key]
        if len(grads) != len(edges):
            raise ProtocolError(
                f"{count_noun(len(grads), 'gradient')} came for {key}, which has {count_noun(len(edges), 'tensor')}"
            )
        self._missing &= ~bit
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` is six calls in Python
        try:
            for edge, grad in zip(edges, grads, strict=True):
                if edge is not None and grad is not None:
                    self._deliver_gradient(edge_of((edge.node, edge.output_nr, None)), grad)
            fired = [one for part in self._take_ready_regions() for one in self._run_region(part)]
            self.ran = self.regions - len(self._waiting)
            return fired
        finally:
            torch._C._set_grad_enabled(before)

    def _deliver_gradient(self, edge: GradientEdge, grad: Tensor) -> None:
        part = self._part_of.get(edge.node)
        if part is not None:
            part.add_gradient(edge, grad)

    def _take_ready_regions(self) -> list[Region]:
        ready = [part for part in self._waiting if not part.roots & self._missing]
        self._waiting = [part for part in self._waiting if part.roots & self._missing]
        return ready

    def _run_region(self, part: Region) -> list[Fired]:
        if self.spans is not None:  # a front and its rest have the same roots
            self.spans[part.roots] = self.spans.get(part.roots, [monotonic()])[:1]
        ends = part.end_edges()
        grads: Grads = [None] * len(ends)
        tapped: Portions = []
        if part.entries:
            grads, tapped = run_tapped(part.entries, ends, part.taps, self._retain_graph)
        left = iter(grads)  # in the order of `end_edges`
        self._leaves += zip(part.leaves, left, strict=False)
        fired = [Fired(recv.key, [next(left) if wanted else None for wanted in recv.wanted]) for recv in part.recvs]
        for edge, grad in chain(zip(part.shared, left, strict=True), tapped):
            if grad is not None:
                self._deliver_gradient(edge, grad)
        if self.spans is not None:
            self.spans[part.roots] = [self.spans[part.roots][0], monotonic()]
        return fired
