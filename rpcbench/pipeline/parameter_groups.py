"""Groups of parameters with options of their own for a stage's optimizer, by names of the un-split model.

Guarantees: every stage has the same groups, some of them empty; copies of a tied weight are in the same group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.lazy import Lazy
from rpcbench.pipeline.split import Stage

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]
Groups = Mapping[str, Mapping[str, Any]] | Callable[[Named], Iterable[Group]]
"""Options by pattern of names, or a function that makes torch's groups of a stage's named parameters."""


def grouped(groups: Groups | None, named: Named) -> list[Group]:
    """Torch's groups of these parameters. PipelineError where a function makes something else."""
    if groups is None:
        return [{"params": [parameter for _, parameter in named]}]
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
    """First the parameters that no pattern has, then those of each; the first pattern that fits has a parameter."""
    made: dict[str | None, Group] = {None: {"params": []}}
    made.update((pattern, {"params": [], **options}) for pattern, options in groups.items())
    for name, parameter in named:
        fitting = next((pattern for pattern in groups if fnmatchcase(name, pattern)), None)
        made[fitting]["params"].append(parameter)
    return list(made.values())


def check_patterns(groups: Groups, stages: Sequence[Stage]) -> None:
    """PipelineError for a pattern that no parameter has; what lazy modules will have is not known yet."""
    modules = [module for stage in stages for module in stage.module.modules()]
    if not isinstance(groups, Mapping) or any(isinstance(module, Lazy) for module in modules):
        return
    names = [stage.key(own) for stage in stages for own, _ in stage.module.named_parameters()]
    for pattern in groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:5])
            raise PipelineError(f"optimizer= has a group for {pattern!r}, but no parameter has such a name: {shown}, …")
