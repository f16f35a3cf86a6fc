"""A model cut into stages: `split` makes a plan, and `Stages.cut` the stages once a schedule has set their number.

    model     embed   layers.0   layers.1   layers.2   head          a chain: each module feeds the next
    at=["layers.1"]          │
    stages    0: embed layers.0      1: layers.1 layers.2 head

Guarantees: every stage has at least one module; the stages in a row are the model; their modules are the model's own,
not copies; each key of a stage's state_dict has its name in the un-split model (`Stage.unsplit_name`).
Rules: only rows of modules can be cut, chains or lists with named values (`part`); a chain within a row may be cut
inside; a buffer that may change belongs to one stage, a parameter may be in several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.pipeline.balance import balance_stages, weigh_links
from rpcbench.pipeline.exchange import count_bytes
from rpcbench.pipeline.lazy import Lazy, Names, Tied, build_stage, ties_of_stage, validate_ties
from rpcbench.pipeline.placement import check_replica_count
from rpcbench.pipeline.stage_graph import (
    OUTSIDE,
    Model,
    ModuleLink,
    Segment,
    StageGraph,
    StageIO,
    check_sendable,
    connect_links,
    expand_chain,
    links_of_model,
    model_inputs,
)
from rpcbench.pipeline.tracing import Recipe, TracedModel, model_arguments
from rpcbench.runtime.handles import layout_of


@dataclass(frozen=True, slots=True)
class Crossing:
    """The values sent from a stage to another for one batch."""

    source: int
    stage: int
    values: tuple[str, ...]  # type and shape of each, as "float32[4, 8]"
    nbytes: int  # of all of them


@dataclass(frozen=True, slots=True)
class Check:
    """The result of `Stages.check`: a comparison of the split model with the whole one. `print` shows it."""

    difference: float  # the largest between two elements of the outputs; 0.0: the same bits
    crossings: tuple[Crossing, ...]  # by sending stage, then by receiving stage

    def __str__(self) -> str:
        lines = [f"largest difference from the whole model: {self.difference:g}"]
        for c in self.crossings:
            lines.append(f"stage {c.source} → {c.stage}: {', '.join(c.values)} ({c.nbytes} bytes)")
        return "\n".join(lines)


def _gather_inputs(
    stage: Stage,
    given: dict[int, tuple[Any, ...]],
    inputs: tuple[Any, ...],
    crossings: list[Crossing],
    stages: Sequence[Stage],
) -> list[Any]:
    values: list[Any] = [None] * len(stage.ports.argument_order)
    for path in stage.ports.takes:
        if path.stage == OUTSIDE:
            message = tuple(inputs[number] for number in stage.ports.inputs)  # not a crossing: the driver sends these
        else:
            (sent,) = (each for each in stages[path.stage].ports.gives if each.stage == stage.index)
            message = tuple(given[path.stage][place] for place in sent.places)
            crossings.append(
                Crossing(path.stage, stage.index, tuple(map(_describe_value, message)), count_bytes(message))
            )
        for place, value in zip(path.places, message, strict=True):
            values[place] = value
    return values


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode inside; afterwards restore the mode of each of its modules."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def _describe_value(value: Any) -> str:
    return layout_of(value) if isinstance(value, torch.Tensor) else repr(value)


def _largest_difference(found: Any, wanted: Any) -> float:
    """Return the largest difference between any two elements; dicts of any class are compared by their keys."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            raise PipelineError(f"the split model gives {_format_keys(found)}, the whole one {_format_keys(wanted)}")
        return max((_largest_difference(found[key], wanted[key]) for key in wanted), default=0.0)
    # A dict is a leaf, also of a class that _pytree does not enter; it is compared by the recursion above.
    (one, spec), (other, others) = (
        _pytree.tree_flatten(made, lambda v: isinstance(v, dict)) for made in (found, wanted)
    )
    if spec != others or isinstance(found, dict) or isinstance(wanted, dict):
        raise PipelineError(f"the split model gives {type(found).__name__}, the whole one {type(wanted).__name__}")
    if spec.is_leaf():
        return _tensor_distance(found, wanted)
    return max(map(_largest_difference, one, other), default=0.0)


def _format_keys(made: dict[Any, Any]) -> str:
    return ", ".join(map(repr, made)) or "an empty dict"


def _tensor_distance(one: Any, other: Any) -> float:
    if not isinstance(one, torch.Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        raise PipelineError(f"the split model gives {_describe_value(one)}, the whole one {_describe_value(other)}")
    same = (one == other) | ((one != one) & (other != other))  # two NaN at one place are the same
    wide = torch.complex128 if one.is_complex() else torch.double
    apart = torch.where(same, 0.0, (one.to(wide) - other.to(wide)).abs())
    return float(apart.max()) if apart.numel() else 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of the model and its worker."""

    index: int
    worker: str
    names: tuple[str, ...]  # names[i]: the un-split name of module[i]
    module: nn.Sequential
    ports: StageIO  # connections to other stages
    prefixes: tuple[str, ...]  # prefixes[i]: the un-split prefix of the parameter names of module[i]
    tied: tuple[Tied, ...] = ()  # weights that its lazy modules share with others

    def unsplit_name(self, own: str) -> str:
        """Return the un-split name of a parameter or buffer of `module`, as "layers.2.weight" for "0.weight" here."""
        return whole_name(self.prefixes, {}, own)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all parameters and buffers under their un-split names; one that is used twice comes twice."""
        parameters = self.module.named_parameters(remove_duplicate=False)
        for own, tensor in chain(parameters, self.module.named_buffers(remove_duplicate=False)):
            yield self.unsplit_name(own), tensor


def whole_name(prefixes: Sequence[str], first: Mapping[str, str], own: str) -> str:
    """Return the un-split name, as `Stage.unsplit_name`; `first` has the names of weights that another stage owns."""
    position, _, rest = own.partition(".")
    return first.get(own, f"{prefixes[int(position)]}{rest}")


@dataclass(frozen=True, slots=True, repr=False)
class Stages:
    """A model to be cut for these workers. Made by `split`."""

    links: tuple[ModuleLink, ...]
    workers: tuple[str, ...]  # those of the first replica, then those of the second, ...
    sizes: tuple[int, ...] | None  # links per stage; None: balance the links' weights
    weights: tuple[int, ...] = ()  # of the links: parameters, nanoseconds or bytes
    inputs: tuple[str, ...] = ()  # names of the model's inputs; empty: one input without a name
    whole: nn.Module | None = None  # the traced model
    replicas: int = 1
    ties: Names = ()  # groups of names of weights that lazy modules share
    name: str = ""  # of the model's class

    def __repr__(self) -> str:
        sizes = "balanced" if self.sizes is None else f"of {_format_names([*map(str, self.sizes)])}"
        return f"<Stages {sizes}, from {count_noun(len(self.links), 'module')}, for {_format_names(self.workers)}>"

    @property
    def row(self) -> tuple[str, ...]:
        """The workers of the first replica."""
        return self.workers[: len(self.workers) // self.replicas]

    def cut(self, homes: Sequence[int] | None = None) -> list[Stage]:
        """Return the stages of one replica.

        Args:
            homes: for each stage the index of its worker in `row`; None: one stage for each worker, in order.

        Raises:
            PipelineError: if the split has another number of stages, the model has too few modules, or two stages share
                a buffer.
        """
        homes = range(len(self.row)) if homes is None else homes
        bounds = list(accumulate(self._stage_sizes(len(homes)), initial=0))
        wiring = StageGraph(self.links, connect_links(self.links, self.inputs), bounds)
        own = [self.links[begin:end] for begin, end in pairwise(bounds)]
        stages = [
            Stage(
                index,
                self.row[worker],
                tuple(link.name for link in own[index]),
                wiring.make_module(index),
                wiring.make_stage_io(index),
                tuple(link.key_prefix for link in own[index]),
                ties_of_stage(self.ties, self.links, *bounds[index : index + 2]),
            )
            for index, worker in enumerate(homes)
        ]
        _refuse_tied_buffers(stages)
        _refuse_shared_memory(stages)
        return stages

    def check(self, x: Any) -> Check:
        """Run the stages here, one after the other, on a batch `x`, and compare their output with the whole model's.
        Returns the largest difference of the outputs, in evaluation mode, and the values that cross each cut. A model
        that is not traced is run as the row of modules that it is; lazy modules are built for it, in this process."""
        inputs = model_inputs(x, self.inputs)
        whole, (args, kwargs) = self.whole, model_arguments(x)
        if whole is None:
            # One stage of all links is the whole model.
            (one,) = replace(self, workers=self.workers[:1], sizes=(len(self.links),), replicas=1).cut()
            whole, args, kwargs = (
                build_stage(one.module, one.tied),
                tuple(inputs[number] for number in one.ports.inputs),
                {},
            )
        stages = [replace(stage, module=build_stage(stage.module, stage.tied)) for stage in self.cut()]
        given: dict[int, tuple[Any, ...]] = {}  # stage -> the values that it has given
        crossings: list[Crossing] = []
        made: Any = None
        with contextlib.ExitStack() as modes, torch.no_grad():
            modes.enter_context(evaluation_mode(whole))
            for stage in stages:
                modes.enter_context(evaluation_mode(stage.module))
                made = stage.module(*_gather_inputs(stage, given, inputs, crossings, stages))
                if stage is not stages[-1]:
                    given[stage.index] = check_sendable(
                        made if isinstance(stage.module, Segment) else (made,), stage.index
                    )
            found = _largest_difference(made, whole(*args, **kwargs))
        return Check(found, tuple(sorted(crossings, key=lambda c: (c.source, c.stage))))

    def _stage_sizes(self, stages: int) -> Sequence[int]:
        if self.sizes is None:
            _check_enough(self.links, stages)
            return balance_stages(self.weights, stages)
        if len(self.sizes) != stages:
            raise PipelineError(
                f"the split has {count_noun(len(self.sizes), 'stage')}, but this schedule runs {stages} on "
                f"{_format_names(self.row)}: split into as many, or choose other workers or another schedule"
            )
        return self.sizes


def split(
    model: Model | TracedModel,
    workers: Sequence[str],
    balance: str | Sequence[int] = "params",
    at: Sequence[str] | None = None,
    inputs: Sequence[str] = (),
    sample: Any = None,
    replicas: int = 1,
    tie: Sequence[Sequence[str]] = (),
) -> Stages:
    """Plan how to cut `model` into stages for these workers. Nothing is sent or copied.

        split(model, ["worker1", "worker2"])                      # the largest stage as small as can be, in parameters
        split(model, ["worker1", "worker2"], balance=[3, 1])      # that many of the model's children in each stage
        split(model, ["worker1", "worker2"], at=["layers.2"])     # a new stage begins at each of these modules
        split(model, ["worker1", "worker2"], balance="time", sample=x[:8])      # ... in time, as measured here
        split(model, ["worker1", "worker2"], balance="memory", sample=x[:8])    # ... in bytes, weights and activations
        split([lazy(nn.Linear, 4, 8), nn.ReLU()], ["worker1", "worker2"], balance=[1, 1])    # built on the workers
        split(model, ["worker1", "worker2", "worker3", "worker4"], replicas=2)      # on 1 and 2, and on 3 and 4

    In a chain each module is called with the one value that the module before returned, and the first with the batch.
    Where values skip modules, or a module takes or gives several, give a list (or a dict, for names of your own) with
    their names, and name the model's inputs:

        split([embed, part(encode, gives=("h", "enc")), part(middle, takes=("h",), gives=("h",)),
               part(decode, takes=("h", "enc", "mask"))], workers, inputs=("tokens", "mask"))

    A value is sent from the stage that gives it straight to those that take it, and its gradients come back the same
    way; see `part`. The model's inputs get no gradient. A parameter that modules of several stages share has a copy in
    each; all copies get the sum of their gradients, so they stay equal.

    Args:
        model: an nn.Sequential, a list or dict of modules and parts, or `traced(model, x)` for any other forward.
        workers: names of the workers, each once.
        balance: "params", "time" or "memory", or the number of the model's children in each stage.
        at: names of the modules at which the second and each later stage begins.
        inputs: names of the model's inputs; a batch is then a dict of tensors by these names, or a tuple in this order.
        sample: a batch, for balance="time" and "memory".
        replicas: how many copies of the model train on their shares of each batch, each on as many workers, split
            alike. Gradients are added up over all replicas, so they stay equal.
        tie: weights that lazy modules share, by their names: `[("embed.weight", "head.weight")]`.

    Returns:
        The plan, for `Pipeline`.

    Raises:
        PipelineError: if the model is not a chain, or the numbers or names do not fit it.
    """
    workers = _checked_workers(workers)
    check_replica_count(workers, replicas)
    row = workers[: len(workers) // replicas]
    whole = model.model if isinstance(model, TracedModel) else None
    if isinstance(model, TracedModel):
        parts, inputs = [[link] for link in model.links], model.inputs  # already a row of modules
    else:
        parts = [expand_chain(child) for child in links_of_model(model)]
    links = tuple(link for part in parts for link in part)
    _refuse_shapeless(links)
    _check_enough(links, len(row))
    ties = validate_ties(tie, links)
    names = _checked_inputs(inputs)
    taken = connect_links(links, names)
    sizes: list[int] | None = None
    weights: Sequence[int] = ()
    if at is not None:
        if balance != "params":
            raise PipelineError(f"give balance={balance!r} or at={at!r}, not both")
        sizes = _sizes_at(at, links)
    elif not isinstance(balance, str):
        sizes = _sizes_by_children(balance, [len(part) for part in parts])
    else:
        weights = weigh_links(balance, links, taken, None if sample is None else model_inputs(sample, names))
    name = type(model if whole is None else whole).__name__
    return Stages(links, workers, _shared_out(sizes, row), tuple(weights), names, whole, replicas, ties, name)


def _shared_out(sizes: Sequence[int] | None, row: Sequence[str]) -> tuple[int, ...] | None:
    """Return the sizes of the stages. PipelineError where they do not give each worker equally many stages."""
    if sizes is not None and len(sizes) % len(row):
        raise PipelineError(
            f"{count_noun(len(sizes), 'stage')} for {count_noun(len(row), 'worker')} ({_format_names(row)}): each "
            "worker needs as "
            "many stages as the others. Split into fewer or more stages, or start more workers"
        )
    return None if sizes is None else tuple(sizes)


def _checked_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    if isinstance(inputs, str) or not all(isinstance(name, str) for name in inputs):
        raise PipelineError(f'inputs must be a list of names as inputs=("tokens", "mask"), not {inputs!r}')
    if len(set(inputs)) < len(inputs):
        raise PipelineError(f"inputs={tuple(inputs)!r} has a name twice")
    return tuple(inputs)


def _checked_workers(workers: Sequence[str]) -> tuple[str, ...]:
    named = isinstance(workers, Iterable) and not isinstance(workers, str)
    if not named or not workers or not all(isinstance(worker, str) for worker in workers):
        raise PipelineError(f'workers must be a list of names as ["worker1", "worker2"], not {workers!r}')
    twice = sorted({worker for worker in workers if list(workers).count(worker) > 1})
    if twice:
        raise PipelineError(f"worker {twice[0]!r} is named twice; several stages on a worker are the schedule's choice")
    return tuple(workers)


def _check_enough(links: Sequence[ModuleLink], stages: int) -> None:
    if len(links) < stages:
        raise PipelineError(
            f"{stages} stages need at least {stages} modules, but the model has {len(links)} ({_link_names(links)}): "
            "use fewer workers, or cut the model finer"
        )


def _sizes_by_children(balance: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Return links per stage for children per stage; `widths` is the number of links of each child."""
    if not all(isinstance(size, int) and size > 0 for size in balance):
        raise PipelineError(f"balance={list(balance)!r}: each stage needs a whole number of modules, at least 1")
    if sum(balance) != len(widths):
        raise PipelineError(
            f"balance={list(balance)!r} shares out {sum(balance)} modules, but the model has {len(widths)}"
        )
    return [sum(widths[begin:end]) for begin, end in pairwise(accumulate(balance, initial=0))]


def _sizes_at(at: Sequence[str], links: Sequence[ModuleLink]) -> list[int]:
    if isinstance(at, str):
        raise PipelineError(f"at must be a list of names: at=[{at!r}]")
    starts = [_find_start(name, links) for name in at]
    bounds = [0, *starts, len(links)]
    for name, (before, start) in zip(at, pairwise(bounds[:-1]), strict=True):
        if start <= before:
            raise PipelineError(
                f"at={list(at)!r}: no module is left for the stage before {name!r}. Name, in the model's order, "
                "the first module of each stage but the first"
            )
    return [end - begin for begin, end in pairwise(bounds)]


def _find_start(name: str, links: Sequence[ModuleLink]) -> int:
    for index, link in enumerate(links):
        if f"{link.name}.".startswith(f"{name}."):  # a name may be that of a chain: its first link
            return index
    raise PipelineError(f"the model cannot be cut at {name!r}; its modules are {_link_names(links)}")


def _refuse_tied_buffers(stages: Sequence[Stage]) -> None:
    """Raise PipelineError if two stages share a buffer."""
    # Each stage would change its own copy of a buffer, unnoticed. Tied weights stay equal by their gradients (`ties`).
    if all(isinstance(module, Recipe) for stage in stages for module in stage.module):
        return  # a trace changes no buffer, so copies stay equal
    first: dict[int, tuple[int, str]] = {}
    for stage in stages:
        for own, tensor in stage.module.named_buffers():
            index, other = first.setdefault(id(tensor), (stage.index, stage.unsplit_name(own)))
            if index != stage.index:
                raise PipelineError(
                    f"{stage.unsplit_name(own)!r} of stage {stage.index} is tied to {other!r} of stage {index}: "
                    "stages can have weights in common, but no buffers. Cut elsewhere (balance=, at=) so that one "
                    "stage has both, or untie them"
                )


def _refuse_shared_memory(stages: Sequence[Stage]) -> None:
    """Raise PipelineError if two stages have different parameters in the same memory."""
    # On their workers each would have memory of its own, and be trained apart, unnoticed.
    first: dict[int, tuple[int, str, nn.Parameter]] = {}
    for stage in stages:
        for own, parameter in stage.module.named_parameters():
            if not (place := _place_in_memory(parameter)):
                continue
            index, other, there = first.setdefault(place, (stage.index, stage.unsplit_name(own), parameter))
            if index != stage.index and parameter is not there:
                raise PipelineError(
                    f"{stage.unsplit_name(own)!r} of stage {stage.index} has the memory of {other!r} of stage "
                    f"{index}, but is another Parameter, so each stage would train its own. To tie them give both "
                    "modules the same Parameter; else give one a clone of the tensor"
                )


def _place_in_memory(parameter: nn.Parameter) -> int:
    """Return the address of a parameter's first element; 0 for one without memory of its own kind, as on `meta`."""
    plain = parameter.layout is torch.strided and not is_lazy(parameter) and type(parameter.data) is torch.Tensor
    return parameter.data_ptr() if plain and parameter.numel() else 0


def _refuse_shapeless(links: Sequence[ModuleLink]) -> None:
    """Raise PipelineError for a module of torch whose parameters have no shape yet, as nn.LazyLinear."""
    for link in links:
        for own, parameter in link.module.named_parameters():
            if is_lazy(parameter):
                raise PipelineError(
                    f"parameter {own!r} of module {link.name!r} ({type(link.module).__name__}) has no shape yet: call "
                    "the model once with a sample, or give split() a list with lazy(nn.Linear, 4, 8) in its place"
                )


def _link_names(links: Sequence[ModuleLink]) -> str:
    return _format_names([link.name for link in links])


def _format_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])  # enough to see a pattern, short enough for an error
    return shown if len(names) <= 12 else f"{shown}, … {names[-1]}"


Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]
Groups = Mapping[str, Mapping[str, Any]] | Callable[[Named], Iterable[Group]]
"""Options by pattern of names, or a function that makes torch's groups of a stage's named parameters."""


def parameter_groups(groups: Groups, named: Named) -> list[Group]:
    """Return torch's parameter groups. PipelineError where a user's function returns anything else."""
    if isinstance(groups, Mapping):
        return _by_pattern(groups, named)
    made = [dict(group) if isinstance(group, Mapping) else group for group in groups(named)]
    own = {parameter for _, parameter in named}
    for group in made:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise PipelineError(f"a function for optimizer= must give groups as {{'params': [...]}}, not {group!r:.80}")
        if not own.issuperset(group["params"]):
            raise PipelineError("a function for optimizer= has given parameters that are not among those it got")
    return made


def _by_pattern(groups: Mapping[str, Mapping[str, Any]], named: Named) -> list[Group]:
    """Return a group of the parameters that fit no pattern, then one per pattern; the first that fits counts."""
    made: dict[str | None, Group] = {None: {"params": []}}
    made.update((pattern, {"params": [], **options}) for pattern, options in groups.items())
    for name, parameter in named:
        fitting = next((pattern for pattern in groups if fnmatchcase(name, pattern)), None)
        made[fitting]["params"].append(parameter)
    return list(made.values())


def check_patterns(groups: Groups, stages: Sequence[Stage]) -> None:
    """Raise PipelineError for a pattern that no parameter fits."""
    # The parameters of lazy modules are not known yet; with those, no pattern can be refused.
    modules = [module for stage in stages for module in stage.module.modules()]
    if not isinstance(groups, Mapping) or any(isinstance(module, Lazy) for module in modules):
        return
    names = [stage.unsplit_name(own) for stage in stages for own, _ in stage.module.named_parameters()]
    for pattern in groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:5])
            raise PipelineError(f"optimizer= has a group for {pattern!r}, but no parameter has such a name: {shown}, …")
