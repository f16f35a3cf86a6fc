"""A training step on ranks that are not there, for lesson 37: `play(step, world)` runs `step(rank)` on all of them.

A tensor is a name, a size in MB, and a note of what is in it: of a gradient the micro-batches that it is the sum of, of
weights which parts have been updated. So a step that returns has trained: each rank holds what it held before, with
weights that were updated by all micro-batches, and nothing else. Any other step ends with a `StepError`, which names
the mistake and its line. Times are in ms. A collective takes the time of its ring (lesson 20), with latency and
bandwidth of lesson 03. A rank sends one thing at a time, in the order in which its program asks, and computes
meanwhile.
"""

from __future__ import annotations

import linecache
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from step_records import (
    GRADIENTS,
    INPUT,
    INPUT_GRADIENT,
    KEPT,
    STATES,
    WEIGHTS,
    Bar,
    Change,
    Line,
    Name,
    Run,
    StepError,
    World,
)  # fmt: skip
from turns import Turns

Step = Callable[["Rank"], None]
SENT_KINDS = (INPUT, INPUT_GRADIENT)
MOST_CALLS = 2_000  # of a rank: a program that makes more does not end


@dataclass
class Held:
    """A tensor on a rank. `content`: of gradients the micro-batches, of weights the parts that are new."""

    size: float
    content: frozenset[int] = frozenset()
    transfer: Transfer | None = None  # which still reads or writes it


@dataclass(eq=False)
class Transfer:
    """A collective, or a message: it begins when all its members have asked for it and have sent all before it."""

    call: str
    name: Name
    members: tuple[int, ...]
    seconds: float
    sent: float  # MB, by each member
    posted: dict[int, tuple[float, Line, frozenset[int]]] = field(default_factory=dict)
    end: float | None = None

    def __str__(self) -> str:
        return f"{self.call} of {self.name}"


def play(step: Step, world: World) -> Run:
    """Run a step on all ranks. Raises StepError, or what the program itself raises."""
    game = _Game(world)
    try:
        game.turns.run([lambda rank=rank: rank._run(step) for rank in game.ranks])  # type: ignore[misc]
        for rank in game.ranks:
            rank._require_trained()
    except StepError as error:
        error.run, game.run.failed = game.run, True
        raise
    return game.run


class _Game:
    """What the ranks of one run share."""

    def __init__(self, world: World) -> None:
        self.world, self.run = world, Run(world)
        self.turns = Turns(self._explain_stop)
        self.lanes: list[deque[Transfer]] = [deque() for _ in range(world.size)]  # not ended, in the order of asking
        self.free_from = [0.0] * world.size  # when the link of a rank is free
        self.meetings: dict[tuple[int, ...], list[Transfer]] = {}
        self.mail: dict[tuple[int, int, Name], Transfer] = {}
        self.ranks = [Rank(self, number) for number in range(world.size)]

    def post(self, rank: Rank, transfer: Transfer, line: Line, content: frozenset[int]) -> None:
        transfer.posted[rank.number] = (rank.now, line, content)
        self.lanes[rank.number].append(transfer)
        while any(self._begin(lane[0]) for lane in self.lanes if lane):
            pass

    def _begin(self, transfer: Transfer) -> bool:
        """Let a transfer take place, if it is the first of all its members."""
        if any(not self.lanes[member] or self.lanes[member][0] is not transfer for member in transfer.members):
            return False
        begin = max(max(transfer.posted[member][0], self.free_from[member]) for member in transfer.members)
        transfer.end = _round(begin + transfer.seconds)
        for member in transfer.members:
            self.lanes[member].popleft()
            self.free_from[member] = transfer.end
            line = transfer.posted[member][1]
            self.run.bars.append(
                Bar(member, "network", begin, transfer.end, transfer.call, transfer.name, line, transfer.sent)
            )
            self.ranks[member]._end(transfer)
        return True

    # -- nobody can go on
    def _explain_stop(self, number: int) -> StepError:
        parts, seen = [], set()
        while number not in seen and (rank := self.ranks[number]).waits_for is not None:
            seen.add(number)
            wanted, why = rank.wanted()
            parts.append(f"rank {number} waits {rank.waits_for}{why}")
            number = wanted
        told = "; ".join(parts)
        last = "waits already, so none can go on" if number in seen else "has ended its step"
        return StepError(f"Deadlock: {told}; rank {number} {last}.")

    def absent(self, transfer: Transfer, why: str = "") -> tuple[int, str]:
        """A rank that must go on before the transfer can begin; and what is sent before it, if that is why."""
        for member in transfer.members:
            if member not in transfer.posted:
                return member, why
        before = next(self.lanes[member][0] for member in transfer.members if self.lanes[member][0] is not transfer)
        return self.absent(before, f", which comes after {before}")


class Rank:
    """One rank, as the program sees it.

    `number`; `stage` of `stages`; `layers` and `microbatches`, lists of those that are its own; `previous` and `next`,
    the ranks that have the stages before and after, or None.
    """

    def __init__(self, game: _Game, number: int) -> None:
        world = game.world
        self.number = number
        self.stage, self.replica = divmod(number, world.replicas)
        self.stages = world.stages
        self.group = tuple(range(self.stage * world.replicas, (self.stage + 1) * world.replicas))
        self.layers = _share(world.layers, world.stages, self.stage)
        self.microbatches = _share(world.microbatches, world.replicas, self.replica)
        self.previous = number - world.replicas if self.stage else None
        self.next = number + world.replicas if self.stage + 1 < world.stages else None
        self.now = 0.0
        self.waits_for: str | None = None
        self.wanted: Callable[[], tuple[int, str]] = lambda: (number, "")
        self._game, self._world = game, world
        self._held: dict[Name, Held] = {}
        self._gone: dict[Name, str] = {}  # how a tensor went away
        self._met = self._calls = 0
        self._begun: set[tuple[str, int, int]] = set()
        self._too_early: dict[int, Line] = {}  # by layer: an all_gather of weights whose part here was the old one
        self._line = Line(0, "before the step")
        for layer in self.layers:
            self._take(Name(WEIGHTS, layer, shard=world.zero >= 3), world.weights)
            self._take(Name(STATES, layer, shard=world.zero >= 1), world.states)

    def __repr__(self) -> str:
        return f"rank {self.number}"

    # -- compute
    def forward(self, layer: int, microbatch: int) -> None:
        """Takes the layer's input; makes the input of the next layer, and what backward needs of this one."""
        self._enter(layer, microbatch)
        source = Name(INPUT, layer, microbatch)
        self._use_old_weights(layer, "forward")
        if layer:
            self._use(source)
        self._require_first("forward", layer, microbatch)
        self._take(Name(KEPT, layer, microbatch), self._world.kept)
        if layer + 1 < self._world.layers:
            self._take(Name(INPUT, layer + 1, microbatch), self._world.input)
        self._compute("forward", self._world.forward, Name(INPUT, layer, microbatch))
        if layer:
            self._drop(source, "used up by forward")

    def backward(self, layer: int, microbatch: int) -> None:
        """Takes what forward has kept and the gradient of the layer's output; makes that of its input, and adds to
        those of the weights."""
        self._enter(layer, microbatch)
        kept, after = Name(KEPT, layer, microbatch), Name(INPUT_GRADIENT, layer + 1, microbatch)
        self._use_old_weights(layer, "backward")
        self._use(kept)
        if layer + 1 < self._world.layers:
            self._use(after)
        gradients = Name(GRADIENTS, layer)
        if gradients not in self._held:
            self._take(gradients, self._world.weights)
        held = self._use(gradients)
        if layer:
            self._take(Name(INPUT_GRADIENT, layer, microbatch), self._world.input)
        self._compute("backward", self._world.backward, Name(INPUT_GRADIENT, layer, microbatch))
        held.content |= {microbatch}
        self._drop(kept, "used up by backward")
        if layer + 1 < self._world.layers:
            self._drop(after, "used up by backward")

    def update(self, layer: int) -> None:
        """The optimizer's step on a layer, or on the rank's part of it if states or gradients are a shard. Uses up the
        gradients."""
        self._enter(layer)
        gradients, states, weights = (self._whole_or_shard(kind, layer) for kind in (GRADIENTS, STATES, WEIGHTS))
        content = self._use(gradients).content
        self._use(states)
        updated = self._use(weights)
        missing = sorted(set(range(self._world.microbatches)) - content)
        if missing:
            raise self._error(f"the gradient of layer {layer} is partial. In its sum: {_listed(content)}; not in it: "
                              f"{_listed(missing)}{self._why_partial(content)}")  # fmt: skip
        part = len(self.group) > 1 and (gradients.shard or states.shard or weights.shard)
        self._compute("update", self._world.update / (len(self.group) if part else 1), Name(WEIGHTS, layer))
        updated.content |= {self._place} if part else frozenset(range(len(self.group)))
        self._drop(gradients, "used up by update")

    def free(self, kind: str, layer: int, microbatch: int | None = None) -> None:
        """Drops a whole tensor; the rank's shard stays."""
        self._enter(layer, microbatch)
        self._require_kind("free", kind, (WEIGHTS, GRADIENTS, STATES, KEPT, *SENT_KINDS))
        name = Name(kind, layer, microbatch)
        self._use(name)
        self._drop(name, "freed")

    # -- collectives: they begin at once, and the rank waits where it uses their results
    def all_reduce(self, kind: str, layer: int) -> None:
        """Replaces gradients by their sum over the ranks that have this layer."""
        self._enter(layer)
        self._require_kind("all_reduce", kind, (GRADIENTS,))
        held = self._use(Name(kind, layer))
        held.transfer = self._meet("all_reduce", Name(kind, layer), 2, held.content)

    def reduce_scatter(self, kind: str, layer: int) -> None:
        """Replaces whole gradients by the rank's shard of their sum; a shard that is there already grows by it."""
        self._enter(layer)
        self._require_kind("reduce_scatter", kind, (GRADIENTS,))
        whole, shard = Name(kind, layer), Name(kind, layer, shard=True)
        held = self._use(whole)
        if shard not in self._held:
            self._take(shard, self._world.weights)
        self._lose(whole, "given to reduce_scatter")
        self._held[shard].transfer = self._meet("reduce_scatter", whole, 1, held.content)

    def all_gather(self, kind: str, layer: int) -> None:
        """Makes whole weights of the shards of all ranks that have this layer."""
        self._enter(layer)
        self._require_kind("all_gather", kind, (WEIGHTS,))
        whole, mine = Name(kind, layer), self._whole_or_shard(kind, layer)
        content = self._use(mine).content & {self._place}
        if not content:
            self._too_early[layer] = self._line
        if whole not in self._held:
            self._take(whole, self._world.weights)
        elif mine.shard:
            raise self._error(f"{whole.are} there already, gathered before; free them first")
        self._held[whole].transfer = self._meet("all_gather", whole, 1, content)

    def _meet(self, call: str, name: Name, halves: int, content: frozenset[int]) -> Transfer:
        """The transfer that the ranks of the group make together; `halves` of an all-reduce."""
        meetings = self._game.meetings.setdefault(self.group, [])
        if self._met == len(meetings):
            others, world = len(self.group) - 1, self._world
            seconds = halves * others * (world.alpha + world.weights / len(self.group) / world.beta)
            meetings.append(
                Transfer(call, name, self.group, seconds, halves * others * world.weights / len(self.group))
            )
        transfer = meetings[self._met]
        self._met += 1
        if (transfer.call, transfer.name) != (call, name):
            other, (_, line, _) = next(iter(transfer.posted.items()))
            raise self._error(f"the ranks call different collectives. Number {self._met} of this rank is {call} of "
                              f"{name}; of rank {other} it is {transfer}, in {line}")  # fmt: skip
        self._game.post(self, transfer, self._line, content)
        return transfer

    # -- messages
    def send(self, kind: str, layer: int, microbatch: int, to: int) -> None:
        """Sends the input of a layer, or the gradient of its input, and drops it here. Does not wait."""
        self._enter(None, microbatch)
        self._require_kind("send", kind, SENT_KINDS)
        self._require_neighbour("send", to)
        name = Name(kind, layer, microbatch)
        held = self._use(name)
        self._lose(name, f"sent to rank {to}")
        world = self._world
        transfer = Transfer("send", name, (self.number,), world.alpha + held.size / world.beta, held.size)
        self._game.mail[self.number, to, name] = transfer
        self._game.post(self, transfer, self._line, frozenset([to]))

    def receive(self, kind: str, layer: int, microbatch: int, source: int) -> None:
        """Waits for what `source` sends. It takes memory here from when it arrives."""
        self._enter(None, microbatch)
        self._require_kind("receive", kind, SENT_KINDS)
        self._require_neighbour("receive", source)
        name, mail = Name(kind, layer, microbatch), self._game.mail
        key = (source, self.number, name)
        self._wait_until(lambda: key in mail and mail[key].end is not None, f"for {name} from rank {source}",
                         lambda: self._game.absent(mail[key]) if key in mail else (source, ""))  # fmt: skip
        transfer = mail.pop(key)
        self._wait_to(transfer)
        self._held[name] = Held(self._world.input)

    # -- what a rank holds
    def _use(self, name: Name) -> Held:
        """The tensor, when all that still writes it has ended."""
        if name not in self._held:
            raise self._error(f"{name.are} not there{self._why_missing(name)}")
        held = self._held[name]
        if (transfer := held.transfer) is not None:
            self._wait_until(lambda: transfer.end is not None, f"for {transfer}", lambda: self._game.absent(transfer))
            self._wait_to(transfer)
            held.transfer = None
        return held

    def _use_old_weights(self, layer: int, what: str) -> None:
        if self._use(Name(WEIGHTS, layer)).content:
            raise self._error(f"the weights of layer {layer} have been updated already; this {what} needs the old ones")

    def _whole_or_shard(self, kind: str, layer: int) -> Name:
        """The shard if there is one."""
        shard = Name(kind, layer, shard=True)
        return shard if shard in self._held else Name(kind, layer)

    def _take(self, name: Name, size: float) -> None:
        """Memory for a tensor; its size is given as if it was whole."""
        size /= len(self.group) if name.shard else 1
        self._held[name] = Held(size)
        self._change(name, size)

    def _drop(self, name: Name, how: str) -> None:
        self._change(name, -self._lose(name, how).size)

    def _lose(self, name: Name, how: str) -> Held:
        """The rank holds it no longer; its memory may still be in use."""
        self._gone[name] = f"{how} in line {self._line.number}"
        return self._held.pop(name)

    def _change(self, name: Name, size: float, time: float | None = None, line: Line | None = None) -> None:
        kind = WEIGHTS if name.kind == WEIGHTS else "inputs" if name.kind in SENT_KINDS else name.kind
        if name.kind == WEIGHTS and not name.shard and self._world.zero >= 3:
            kind = "gathered"
        when = self.now if time is None else time
        self._game.run.changes.append(Change(when, self.number, kind, size, line or self._line))

    def _end(self, transfer: Transfer) -> None:
        """A transfer of this rank has taken place."""
        assert transfer.end is not None
        line, name = transfer.posted[self.number][1], transfer.name
        if transfer.call == "send":
            (to,) = transfer.posted[self.number][2]
            self._change(name, -self._world.input, transfer.end, line)
            self._game.ranks[to]._change(name, self._world.input, transfer.end, line._replace(sender=self.number))
        elif transfer.call == "all_gather":
            self._held[name].content = frozenset().union(*(content for _, _, content in transfer.posted.values()))
        elif transfer.call == "all_reduce":
            self._held[name].content = self._sum(transfer, [])
        else:
            self._change(name, -self._world.weights, transfer.end, line)
            shard = self._held[name._replace(shard=True)]
            shard.content = self._sum(transfer, [shard.content])

    def _sum(self, transfer: Transfer, more: list[frozenset[int]]) -> frozenset[int]:
        """The micro-batches in a sum; each must be there once."""
        parts = [content for _, _, content in transfer.posted.values()] + more
        total = frozenset[int]().union(*parts)
        if len(total) < sum(map(len, parts)):
            twice = sorted(batch for batch in total if sum(batch in part for part in parts) > 1)
            line = transfer.posted[self.number][1]
            raise StepError(f"Rank {self.number}, {line}: this sum counts {_listed(twice)} more than once. A sum over "
                            "the ranks must not be summed over the ranks again.")  # fmt: skip
        return total

    # -- time
    def _compute(self, call: str, time: float, name: Name) -> None:
        begin, self.now = self.now, _round(self.now + time)
        self._game.run.bars.append(Bar(self.number, "compute", begin, self.now, call, name, self._line))

    def _wait_until(self, ready: Callable[[], bool], words: str, wanted: Callable[[], tuple[int, str]]) -> None:
        """Let other ranks run; `wanted()` is a rank that must go on before this one can, and more words on why."""
        self.waits_for, self.wanted = f"at {self._line}, {words}", wanted
        self._game.turns.wait(self.number, ready)
        self.waits_for = None

    def _wait_to(self, transfer: Transfer) -> None:
        """The clock goes on to the end of a transfer."""
        assert transfer.end is not None
        if transfer.end > self.now:
            self._game.run.bars.append(
                Bar(self.number, "wait", self.now, transfer.end, transfer.call, transfer.name, self._line)
            )
            self.now = transfer.end

    # -- the program
    def _run(self, step: Step) -> None:
        step(self)
        self._line = Line(0, "the end of the step")
        for name in list(self._held):
            self._use(name)

    def _require_trained(self) -> None:
        """The rank holds what it held before the step, and the weights are new."""
        whole = frozenset(range(len(self.group)))
        for name, held in self._held.items():
            want = frozenset([self._place]) if name.shard else whole
            if name.kind == WEIGHTS and not name.shard and self._world.zero >= 3:
                raise self._ends(f"holds {name}, whole; between steps there is room for its shard alone")
            if name.kind == WEIGHTS and held.content != want:
                told = "they are the old ones"
                if held.content:
                    told = f"of {len(want)} parts only {_numbers(held.content)} is new; {self._why_old(name.layer)}"
                raise self._ends(f"does not have the new {name.kind} of layer {name.layer}: {told}")
            if name.kind not in (WEIGHTS, STATES):
                raise self._ends(f"still holds {name}")
        for kind in (WEIGHTS, STATES):
            if lost := [layer for layer in self.layers if self._whole_or_shard(kind, layer) not in self._held]:
                raise self._ends(f"has lost the {kind} of layer {lost[0]}")

    def _enter(self, layer: int | None, microbatch: int | None = None) -> None:
        """At the begin of each call: note the line of the program."""
        self._line = _line_of_program()
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise self._error(f"the rank has made {MOST_CALLS:,} calls, more than any step needs")
        if layer is not None and layer not in self.layers:
            raise self._error(f"layer {layer!r} is not one of this rank; it has {_numbers(self.layers)}")
        if microbatch is not None and microbatch not in self.microbatches:
            raise self._error(f"{microbatch!r} is no micro-batch of this rank; it has {_numbers(self.microbatches)}")

    def _require_first(self, call: str, layer: int, microbatch: int) -> None:
        if (call, layer, microbatch) in self._begun:
            raise self._error(f"layer {layer} has run {call} for micro-batch {microbatch} before")
        self._begun.add((call, layer, microbatch))

    def _require_kind(self, call: str, kind: str, known: tuple[str, ...]) -> None:
        if kind not in known:
            raise self._error(f"{call} takes {' or '.join(map(repr, known))}, not {kind!r}")

    def _require_neighbour(self, call: str, other: int | None) -> None:
        if other is None or other not in (self.previous, self.next):
            near = [number for number in (self.previous, self.next) if number is not None]
            raise self._error(f"{call} names rank {other!r}; the neighbours are {_numbers(near) or 'none'}")

    @property
    def _place(self) -> int:
        """The number of the rank's shard."""
        return self.number - self.group[0]

    # -- words
    def _error(self, words: str) -> StepError:
        return StepError(f"Rank {self.number}, {self._line}: {words}.")

    def _ends(self, words: str) -> StepError:
        return StepError(f"At the end of the step rank {self.number} {words}.")

    def _why_missing(self, name: Name) -> str:
        shard = name._replace(shard=True)
        if name in self._gone:
            return f": {self._gone[name]}"
        if shard in self._held:
            return ". The rank has a shard of them" + ("; all_gather makes them whole" if name.kind == WEIGHTS else "")
        if name.kind == INPUT and self.previous is not None and name.layer == self.layers[0]:
            return f": it was not received from rank {self.previous}"
        if name.kind == INPUT_GRADIENT and self.next is not None and name.layer == self.layers[-1] + 1:
            return f": it was not received from rank {self.next}"
        if name.kind in (WEIGHTS, STATES):
            return ""
        call, off = "forward" if name.kind in (INPUT, KEPT) else "backward", -1 if name.kind == INPUT else 0
        of = "" if name.microbatch is None else f" for micro-batch {name.microbatch}"
        return f": {call} of layer {name.layer + off} has not run{of}"

    def _why_old(self, layer: int) -> str:
        if (line := self._too_early.get(layer)) is not None:
            return f"all_gather in line {line.number} came too early, when no rank had updated its part"
        return "all_gather brings the others"

    def _why_partial(self, content: frozenset[int]) -> str:
        if mine := sorted(set(self.microbatches) - content):
            return f". Backward has not added {_listed(mine)}, which this rank has itself"
        return ". It was not summed over the ranks"


def _line_of_program() -> Line:
    """The innermost line that is not in this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    number = frame.f_lineno
    return Line(number, linecache.getline(frame.f_code.co_filename, number).strip())


def _share(total: int, parts: int, part: int) -> list[int]:
    """Numbers 0 to total - 1 in equal parts."""
    each = total // parts
    return list(range(part * each, (part + 1) * each))


def _round(time: float) -> float:
    return round(time, 6)


def _numbers(numbers: object) -> str:
    return ", ".join(map(str, sorted(numbers)))  # type: ignore[call-overload]


def _listed(batches: object) -> str:
    found = sorted(batches)  # type: ignore[call-overload]
    return f"micro-batch{'' if len(found) == 1 else 'es'} {_numbers(found)}" if found else "none"
