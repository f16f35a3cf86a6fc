"""Keeps the values of the parts of a driven model that are on this process, see `driver_parts`.

Guarantees
- Gradients are those of the autograd context that an optimizer steps with; without an optimizer, those of the context
  that the driver has released last. `.grad` counts where no context has a gradient.
- A call of a part's `forward` is a call of the part, too: `rref.rpc_sync().forward(x)`, as many programs do.
- Calls of a module are in the order of micro-batches in a pipeline, else in the order in which they were sent, however
  the threads of this process run them. A forward that a pipeline recomputes is no call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from rpcbench.autograd import recorder
from rpcbench.compare.capture import Capture, NamedPart
from rpcbench.nn import RemoteModule
from rpcbench.pipeline.execution import running_op
from rpcbench.pipeline.ops import Kind
from rpcbench.pipeline.tracing import Recipe
from rpcbench.runtime.server import call_number


class DriverCapture(Capture):
    """The values of some parts of a model, from now until `close`."""

    keeps_all_steps = True  # an optimizer on another process may have stepped; parameters that it forgets must show

    def __init__(self, parts: Sequence[NamedPart]) -> None:
        self._recorder = recorder()
        super().__init__(parts)
        self._recorder.on_release.append(self.keep_context)
        self._masks.__enter__()

    def close(self) -> None:
        if self._handles:  # it may be closed already
            self._recorder.on_release.remove(self.keep_context)
            self._masks.__exit__()
            for part in self._replaced:
                del part.forward
            self._replaced.clear()
        super().close()

    def keep_context(self, context: int) -> None:
        """Keep the gradients of an autograd context that will be released."""
        with self._recorder.enter_context(context):
            self._keep_parameter_gradients(settles=False)

    def _add_module_hooks(self) -> None:
        super()._add_module_hooks()
        self._replaced = [part for _, part in self._parts if part in self._hooked and "forward" not in vars(part)]
        for part in self._replaced:
            part.forward = partial(self._call_with_hooks, part, part.forward)

    def _call_with_hooks(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a part, by way of its hooks if it was called without them."""
        inside = self._running.current_name() == self._hooked.get(part)  # none of both after `close`
        return forward(*args, **kwargs) if inside else part(*args, **kwargs)

    def _iterate_modules(self) -> Iterator[NamedPart]:
        for name, module in super()._iterate_modules():
            # A recipe is a piece of a traced forward, which no module of the model runs.
            if not isinstance(module, RemoteModule | Recipe):
                yield name, module

    def _is_run_again(self) -> bool:
        op = running_op.get()
        return (op is not None and op.kind is Kind.RECOMPUTE) or super()._is_run_again()

    def _rank_of_call(self) -> int:
        op = running_op.get()
        return call_number() if op is None else 1 + op.microbatch

    def _gradients(self) -> dict[str, Tensor]:
        context = self._recorder.current_context()
        held: dict[Tensor, Tensor] = {}
        if context is not None and context in self._recorder.context_ids():
            held = self._recorder.named_gradients(context)
        own = super()._gradients()
        return own | {name: held[each] for name, each in self._named_parameters().items() if each in held}
