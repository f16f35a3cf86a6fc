r"""One backward pass on one worker, where the gradients of its roots come in any order.

A root is something gradients come for: a local loss, or a message that was sent. A region is the nodes that the same
roots lead to; it runs once, when all these roots have arrived, so every node sees whole sums and every hook runs once.

    roots     A       B          A leads to a, c and d, B to b, c and d. Three regions: {a} runs once A has come,
             / \     / \         {b} once B has come, {c, d} once both have. What a and b give to c is taken off
            a    c─┬─    b       the edge at its near end (a tap), and summed until {c, d} runs.
                   d

Guarantees
- The gradients are those of one local backward from all roots. A pass with one root is one `torch.autograd.grad`.
- `.grad` of no tensor is touched. Hooks of tensors and of nodes run, but for those that belong to the writing of
  `.grad`: `register_post_accumulate_grad_hook`, and hooks on the AccumulateGrad nodes of leaves.
- Without `retain_graph` the buffers of a node are freed when it has run.
- An edge between two regions over which no gradient comes is not followed. What counts by torch's backward, as
  `register_multi_grad_hook` does, counts each region for itself.
- Gradients go from a region to regions that come later in the plan, never back. Roots that have no leaf and no received
  message in common are a region each, whose nodes nothing looks at.

Rules
- One thread at a time calls one pass; several passes may go over one graph at once: each run takes its own gradients.
- Gradients handed out may share memory with each other and with those that came in: nobody changes them in place.
- An end is where a region's gradients are handed out, tensor hooks run: a leaf or recv node that no other region feeds.
  A leaf without hooks may be an end of several regions, unless one leads on to nodes of others: these may lead to that
  leaf too, and torch's engine would go on to it through them. Every other edge that leaves a region is tapped.
- A portion is tapped by a hook that runs after the node at the near end. Captured by torch's engine at the far end, the
  hooks of the node there would run on the portion, and not on the whole sum.
- A built-in node computes what the running backward asks for, and nothing asks for a tapped edge. So the tap calls the
  node once more, inside a backward of one scalar that asks for these edges alone and never gets to them.
- A `Node.register_hook` on such a node sees None for its tapped edges, as in any backward that does not ask for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from rpcbench.autograd.gradients import total
from rpcbench.autograd.graph import Below, Ends, Reach, edge_of, ends, is_leaf, is_recv, leaf_of
from rpcbench.base.errors import ProtocolError, counted

Grads = Sequence["Tensor | None"]
Portions = list[tuple[GradientEdge, "Tensor | None"]]
Taps = Mapping[Any, Sequence[tuple[int, GradientEdge]]]

_RUN = "rpcbench.autograd.regions.run"


def run_tapped(
    starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], taps: Taps, retain_graph: bool
) -> tuple[Grads, Portions]:
    """Run backward from `starts` to `ends`, and up to the edges that `taps` names: their places and targets by node.

    Returns the gradients that came to the ends, and those on the tapped edges. The tensor hooks of an end are run.
    Without ends, the nodes of `taps` are what is run for.
    """
    if not taps:
        return _grad(starts, ends, retain_graph), []
    taken: dict[int, Portions] = {}
    handles = [node.register_hook(partial(_tap, node, edges, taken)) for node, edges in taps.items()]
    try:
        with _stashed(taken):
            grads: Grads = ()
            if ends:
                grads = _grad(starts, ends, retain_graph)
            else:
                inputs = [GradientEdge(node, 0) for node in taps]
                torch.autograd.backward(list(starts), list(starts.values()), retain_graph, inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    return grads, (taken[min(taken)] if taken else [])


@contextlib.contextmanager
def _stashed(taken: object) -> Iterator[None]:
    """Have torch hand `taken` to the threads of the backwards that begin inside, so that a tap knows whose they are."""
    outer = torch._C._get_obj_in_tls(_RUN) if torch._C._is_key_in_tls(_RUN) else None
    torch._C._stash_obj_in_tls(_RUN, taken)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_RUN, outer)


def _grad(starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], retain_graph: bool) -> Grads:
    """`torch.autograd.grad`, without its checks of what was checked before: they cost a third of a small backward."""
    return _engine_run_backward(
        tuple(starts),
        tuple(starts.values()),
        retain_graph,
        False,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def _tap(
    node: Any, edges: Sequence[tuple[int, GradientEdge]], taken: dict[int, Portions], down: Grads, up: Grads
) -> None:
    """Runs after `node` in any backward that has it: note what leaves by the tapped edges, if the run is ours."""
    if not torch._C._is_key_in_tls(_RUN) or torch._C._get_obj_in_tls(_RUN) is not taken:
        return
    if not isinstance(node, torch._C._FunctionBase) and any(down[place] is None for place, _ in edges):
        down = _compute(node, up, [target for _, target in edges])
    portions = taken.setdefault(torch._C._current_graph_task_id(), [])
    portions += [(target, _sum_to_target(down[place], target)) for place, target in edges]


def _compute(node: Any, up: Grads, targets: Sequence[GradientEdge]) -> Grads:
    """What `node` makes of `up` for the edges to `targets` alone."""
    results: list[Any] = []
    scalar = torch.zeros((), requires_grad=True)
    scalar.register_hook(lambda _: results.append(node(*up)))  # type: ignore[no-untyped-call]
    inputs: list[Any] = [scalar, *targets]
    torch.autograd.grad(scalar, inputs, scalar, allow_unused=True)
    (result,) = results
    return result if isinstance(result, tuple) else (result,)


def _sum_to_target(grad: Tensor | None, target: GradientEdge) -> Tensor | None:
    """The gradient summed over what was broadcast: torch's engine does that after the hooks of a node."""
    if grad is None:
        return None
    shape = torch.Size(target.node._input_metadata[target.output_nr].shape)
    return grad if grad.shape == shape else grad.sum_to_size(shape)


RootEdges = Sequence["GradientEdge | None"]


class Part:
    """Nodes that run together.

    `roots` is a bit set. Gradients end at `leaves` and `recvs`, and a portion at each of `shared`, the bare leaves of
    others. `taps` names the tapped edges of each node by place and target. `entries` are the gradients that came from
    outside so far; those in `sums` were made here, and nobody else has them.
    """

    __slots__ = ("entries", "leaves", "recvs", "roots", "shared", "sums", "taps")

    def __init__(self, roots: int, leaves: list[Any], recvs: list[Any]) -> None:
        self.roots = roots
        self.leaves = leaves
        self.recvs = recvs
        self.shared: dict[GradientEdge, None] = {}
        self.taps: dict[Any, list[tuple[int, GradientEdge]]] = {}
        self.entries: dict[GradientEdge, Tensor] = {}
        self.sums: set[GradientEdge] = set()

    def ends(self) -> list[GradientEdge]:
        """Where gradients end: at leaves, at each tensor of recvs, at what is shared."""
        leaves = map(edge_of, zip(self.leaves, repeat(0), repeat(None)))
        recvs = [GradientEdge(recv, number) for recv in self.recvs for number in range(sum(recv.wanted))]
        return [*leaves, *recvs, *self.shared]

    def add(self, edge: GradientEdge, grad: Tensor) -> None:
        """Take a gradient that enters by this edge."""
        before = self.entries.get(edge)
        if before is None:
            self.entries[edge] = grad
        elif edge in self.sums and before.layout is torch.strided:
            before += grad
        else:
            self.entries[edge] = total(before, grad)
            self.sums.add(edge)


class Plan:
    """All parts, in an order in which they can run, and the part of each node that gradients may be brought to.

    `found` is what each root leads to, where that is known of all.
    """

    def __init__(self, roots: Sequence[RootEdges], found: Sequence[Ends] = ()) -> None:
        self.part_of: dict[Any, Part] = {}
        if len(roots) == 1 and not found:
            found = [ends(roots[0])]
        if found and _apart(found):
            self.parts = [self._whole(*one) for one in zip(range(len(roots)), roots, found, strict=True)]
            return
        self._parts: dict[tuple[int, bool], Part] = {}
        together = Reach(chain.from_iterable(roots))
        self._divide(_bits(roots, together), together)
        order = sorted(self._parts, key=lambda key: (key[0].bit_count(), *key))
        self.parts = [self._parts[key] for key in order]

    def _part(self, roots: int, rest: bool) -> Part:
        """Two for each set of roots: what leads to ends, then the rest, which only leads to other parts."""
        part = self._parts.get((roots, rest))
        if part is None:
            part = self._parts[roots, rest] = Part(roots, [], [])
        return part

    def _whole(self, number: int, root: RootEdges, found: Ends) -> Part:
        part = Part(1 << number, found.leaves, [*found.recvs.values()])
        for edge in root:
            if edge is not None:
                self.part_of[edge.node] = part
        return part

    def _divide(self, bits: dict[Any, int], found: Reach) -> None:
        leading_on = {
            bits[node]
            for node, below in found.below.items()
            for child, _ in below
            if child is not None and bits[child] != bits[node] and not _is_terminal(child)
        }
        for node, below in found.below.items():
            roots = bits[node]
            if _is_terminal(node):
                part = self.part_of[node] = self._part(roots, False)
                (part.leaves if is_leaf(node) else part.recvs).append(node)
            else:
                self._place(node, below, roots, share=roots not in leading_on)

    def _place(self, node: Any, below: Below, roots: int, share: bool) -> None:
        """Put an inner node into its part; what it leads to is in place already."""
        front = self._part(roots, False)
        homes = []
        for child, number in below:
            home = self.part_of.get(child)
            if share and home is not front and child is not None and _is_bare_leaf(child):
                home = front
                front.shared[GradientEdge(child, number)] = None
            homes.append(home)
        if front in homes:
            mine = front
        elif any(homes):
            mine = self._part(roots, True)
        else:
            return
        self.part_of[node] = mine
        away = [
            (place, GradientEdge(child, number))
            for place, (child, number) in enumerate(below)
            if child is not None and homes[place] not in (None, mine)
        ]
        if away:
            mine.taps[node] = away


def _apart(found: Sequence[Ends]) -> bool:
    """Whether no two lead to the same leaf or received message."""
    seen: set[Any] = set()
    for one in found:
        if not seen.isdisjoint(terminals := one.terminals):
            return False
        seen.update(terminals)
    return True


def _bits(roots: Sequence[RootEdges], found: Reach) -> dict[Any, int]:
    """For each node the set of roots that lead to it."""
    bits: dict[Any, int] = dict.fromkeys(found.below, 0)
    for number, root in enumerate(roots):
        for edge in root:
            if edge is not None:
                bits[edge.node] |= 1 << number
    for node in reversed(found.below):
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
    """The final gradients of one received message, one for each place in it.

    None stands where no gradient came, as it does between nodes of a local backward.
    """

    key: Any
    grads: list[Tensor | None]


class LocalPass:
    """One backward pass over this worker's part of the graph.

    `roots` has the edges of each root that takes part, as `graph.edges` gives them. `found` is what each of them leads
    to, in that order, where that is known of all.
    """

    def __init__(
        self,
        roots: Mapping[Any, Sequence[GradientEdge | None]],
        retain_graph: bool = False,
        found: Sequence[Ends] = (),
    ) -> None:
        self._roots = roots  # also what keeps the graph alive
        self._retain_graph = retain_graph
        self._bits = {key: 1 << number for number, key in enumerate(roots)}
        self._missing = (1 << len(roots)) - 1
        self._leaves: list[tuple[Any, Tensor | None]] = []
        plan = Plan(list(roots.values()), found)
        self._part_of, self._waiting = plan.part_of, plan.parts
        self.regions, self.ran = len(plan.parts), 0

    @property
    def complete(self) -> bool:
        """Whether all roots have arrived, and so everything has run."""
        return not self._missing

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """The leaf tensors reached so far for the last time, with their final gradients; all of them when complete."""
        return [
            (leaf, grad) for node, grad in self._leaves if grad is not None and (leaf := node.variable).requires_grad
        ]

    def arrive(self, key: Hashable, grads: Sequence[Tensor | None]) -> list[Fired]:
        """Take the gradients of one root and run all that has become complete; returns what can be sent on.

        Errors of user code pass through; the pass is then over. ProtocolError for a root that is not (or no longer)
        expected, or another number of gradients than the root has edges.
        """
        bit = self._bits.get(key, 0)
        if not bit & self._missing:
            raise ProtocolError(f"gradients came for {key}, which this backward pass does not wait for")
        edges = self._roots[key]
        if len(grads) != len(edges):
            raise ProtocolError(
                f"{counted(len(grads), 'gradient')} came for {key}, which has {counted(len(edges), 'tensor')}"
            )
        self._missing &= ~bit
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` is six calls in Python
        try:
            for edge, grad in zip(edges, grads, strict=True):
                if edge is not None and grad is not None:
                    self._bring(edge_of((edge.node, edge.output_nr, None)), grad)
            fired = [one for part in self._ready() for one in self._run(part)]
            self.ran = self.regions - len(self._waiting)
            return fired
        finally:
            torch._C._set_grad_enabled(before)

    def _bring(self, edge: GradientEdge, grad: Tensor) -> None:
        part = self._part_of.get(edge.node)
        if part is not None:
            part.add(edge, grad)

    def _ready(self) -> list[Part]:
        ready: list[Part] = []
        waiting: list[Part] = []
        for part in self._waiting:
            (waiting if part.roots & self._missing else ready).append(part)
        self._waiting = waiting
        return ready

    def _run(self, part: Part) -> list[Fired]:
        ends = part.ends()
        grads: Grads = [None] * len(ends)
        tapped: Portions = []
        if part.entries:
            grads, tapped = run_tapped(part.entries, ends, part.taps, self._retain_graph)
        left = iter(grads)  # in the order of `ends`
        self._leaves += zip(part.leaves, left, strict=False)
        fired = [Fired(recv.key, [next(left) if wanted else None for wanted in recv.wanted]) for recv in part.recvs]
        for edge, grad in chain(zip(part.shared, left, strict=True), tapped):
            if grad is not None:
                self._bring(edge, grad)
        return fired
