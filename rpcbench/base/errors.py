"""All errors that rpcbench raises, in one tree. Each text names the culprit, and the remedy.

    RuntimeError
    ├── NamesError                    names of dimensions that do not match; see rpcbench.named
    └── RpcError                      any error of a call; programs written for torch match on RuntimeError
        ├── RpcTimeoutError           (also TimeoutError) the deadline passed; the callee may still run
        ├── WorkerLostError           the other process is gone
        │   └── StageLostError        ... and stages of a pipeline with it; lists these, and the steps of the others
        ├── ConnectionLostError       the other process still runs, but a message to or from it was lost
        ├── UnknownWorkerError        (also ValueError) no such worker: a typing error of the caller
        ├── ChoiceError               a name given to `rpcbench state` fits no cluster, or several
        ├── UnknownVariableError      (also KeyError) no such variable on a worker: a typing error as well
        ├── NoOverloadError           (also TypeError) an operator of torch that does not take these arguments
        ├── SerializationError        (also TypeError) an argument or result that cannot be sent
        │   ├── MissingCodeError      (also AttributeError) the receiver lacks a function or class of the sender
        │   └── MessageTooLarge       (also ProtocolError) more bytes or tensors than one message may carry
        ├── RemoteError               the `__cause__` of a user's error: the worker and the remote traceback
        ├── DeadlockError             calls that wait for each other in a cycle
        ├── CollectiveError           (also ValueError) ranks of a process group disagree, or one is wrong
        │   └── RankFailedError       another rank of `cluster.spmd` has failed; raised on those that it ended
        ├── CallCancelled             the caller, or Ctrl-C, cancelled the call
        ├── NotConnectedError         the peer cannot be reached (yet)
        ├── IncompleteWorldError      not all members joined in time; the text names those that did
        ├── ShutdownError             this side has stopped, or is stopping
        ├── TurnedAwayError           the member that was asked for admission is not the leader any more: ask again
        └── ProtocolError             a peer broke the rules: invalid bytes, an unknown message, a wrong size
            ├── InvalidTransitionError  an event that the state of an object does not allow
            ├── AuthenticationError   a peer without the secret
            ├── VersionMismatch       a peer with an incompatible version of Python or rpcbench
            └── RefusedError          a peer that identified this process and refuses it, for the reason in the text
    ValueError
    └── PipelineError                 a split or a schedule that cannot run; raised before anything is sent

All can be pickled: `args` are the constructor's arguments. Common phrases of error texts are here, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

__all__ = [
    "AuthenticationError", "CallCancelled", "CollectiveError", "ConnectionLostError", "DeadlockError",
    "IncompleteWorldError", "InvalidTransitionError", "MessageTooLarge", "NamesError", "NoOverloadError",
    "NotConnectedError", "PipelineError", "ProtocolError", "RankFailedError", "RefusedError", "RemoteError", "RpcError",
    "RpcTimeoutError", "SerializationError", "ShutdownError", "StageLostError", "TurnedAwayError",
    "UnknownVariableError", "UnknownWorkerError", "VersionMismatch", "WorkerLostError",
]  # fmt: skip


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `2 workers`, `2 batches`."""
    ending = "es" if noun.endswith(("s", "x", "sh", "tch", "nch")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def format_bytes(count: int) -> str:
    """Return bytes with a unit: `4.1 kB`."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 99.95 else f"{value:.1f} {units[0]}"


def format_part(part: int, whole: int) -> str:
    """Return bytes and those that they are a part of, with one unit where it fits both: `1.2 of 25.3 GB`."""
    all_, unit = format_bytes(whole).split()
    return f"{format_bytes(part).removesuffix(f' {unit}')} of {all_} {unit}"


def suggest_nearest(word: str, there: Iterable[str]) -> str:
    """Return a hint on a wrong word: `did you mean workers? There are rrefs, workers`."""
    names = list(there)
    near = difflib.get_close_matches(word, names, 1, 0.5)  # 0.5: finds "worker1" for "wroker1", and not any short name
    listing = f"here are {', '.join(names)}" if names else "here are none"
    return f"did you mean {near[0]}? T{listing}" if near else f"t{listing}"


E = TypeVar("E", bound="RpcError")
NOT_INITIALIZED = (
    "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework? Call "
    "rpcbench.rpc.init_rpc first, or start workers: rpcbench.Cluster(2), in a notebook %cluster start 2."
)
FORKED = (
    "RPC has not been initialized in this process: it is a fork of {}, without the parent's threads and connections. "
    "Call init_rpc here, or start processes that need no fork: multiprocessing's spawn, or workers."
)


class RpcError(RuntimeError):
    """Root of all errors of remote calls. Calls are never repeated automatically: see `maybe_executed`."""

    maybe_executed: bool = False  # the callee may have run the function; True if this cannot be decided


def mark_never_ran(error: E) -> E:
    """Mark an error of a call that is known not to have run anywhere."""
    error.maybe_executed = False
    return error


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a call passed before the reply came."""

    maybe_executed = True


class WorkerLostError(RpcError):
    """The worker that a call, an RRef or a backward pass needs is lost.

    Source: raised on the caller when the connection ends or the worker's process exits.
    """

    maybe_executed = True


class CollectiveError(RpcError, ValueError):
    """Ranks of a process group disagree on their next operation, or one of them requested an impossible one.

    Source: raised on every rank that takes part. The text names the rank at fault and lists the call of each rank.
    """


class RankFailedError(CollectiveError):
    """Another rank of `cluster.spmd` has failed, and so ended this one. The text names it, with its error."""


class CompareError(ValueError):
    """Two programs cannot be compared: one returns no loss, is random, or has no module in common with the other."""


class SimulationError(RuntimeError):
    """A program cannot be simulated: it reads the value of a tensor, has shapes that depend on values, or does not fit
    its mesh."""


class StageLostError(WorkerLostError):
    """Workers of a pipeline are lost, and their stages with them.

    Attributes:
        at: Lost worker → its operation, such as "in B3 of stage 1".
        stages: The lost stages. With replicas these numbers, and those in `held`, are indices of `pipe.stages`, which
            has all stages of the first replica, then those of the second.
        held: Stage → the least and the most optimizer steps that it has applied; None if unknown.
    """

    def __init__(
        self, text: str, at: dict[str, str], stages: tuple[int, ...], held: dict[int, tuple[int, int] | None]
    ) -> None:
        super().__init__(text, at, stages, held)
        self.at, self.stages, self.held = at, stages, held

    def __str__(self) -> str:
        return str(self.args[0])


class ConnectionLostError(RpcError):
    """The connection broke, or lost a message, while a call was in flight; the worker still runs.

    `maybe_executed` is False if the function has certainly not run and never will: then a repetition is safe.
    """

    maybe_executed = True

    def __init__(self, text: str, maybe_executed: bool = True) -> None:
        super().__init__(text, maybe_executed)
        self.maybe_executed = maybe_executed

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownWorkerError(RpcError, ValueError):
    """A name or id that belongs to no member of this world."""

    @classmethod
    def of(cls, key: int | str, there: Iterable[str]) -> UnknownWorkerError:
        """Make the error with torch's words, all names, and the most similar one."""
        kind = "id" if isinstance(key, int) else "name"
        return cls(f"could not find destination {kind} {key}: {suggest_nearest(str(key), there)}")


class ChoiceError(RpcError):
    """A name given to a command fits nothing that is there, or several things."""


class UnknownVariableError(RpcError, KeyError):
    """A name that no variable of a worker's cells has; the text names the most similar one."""

    @classmethod
    def of(cls, worker: str, name: str, there: Iterable[str]) -> UnknownVariableError:
        """Make the error with the names of all variables."""
        return cls(f"{worker} has no variable {name!r}: {suggest_nearest(name, there)}")

    def __str__(self) -> str:  # that of KeyError is in quotes
        return str(self.args[0])


class NoOverloadError(RpcError, TypeError):
    """A call of an operator of torch with arguments that match none of its signatures; nothing was sent."""


class SerializationError(RpcError, TypeError):
    """A value that cannot be sent, with the path to the part at fault."""


class RemoteError(RpcError):
    """The `__cause__` of a user's error, with the worker and the remote traceback. It is never raised by itself."""

    def __init__(self, worker: str, traceback: str) -> None:
        super().__init__(worker, traceback)
        self.worker = worker
        self.traceback = traceback

    def __str__(self) -> str:
        return f"on {self.worker}:\n{self.traceback}"


def is_worker_loss(error: BaseException | None) -> bool:
    """Return whether a call ended because its own worker was lost."""
    # An error that the function raised has a RemoteError as its cause, also one about the loss of another worker.
    return isinstance(error, WorkerLostError) and not isinstance(error.__cause__, RemoteError)


class CallCancelled(RpcError):
    """The caller cancelled the call; the callee was notified, and may still run."""

    maybe_executed = True


class DeadlockError(RpcError):
    """Calls wait for each other in a cycle, which the text shows; this error ended one of the waits."""

    maybe_executed = True


class NotConnectedError(RpcError):
    """No connection to the peer could be made."""


class IncompleteWorldError(RpcError):
    """A world without all its members: some did not join in time, or did not find worker 0."""


class ShutdownError(RpcError):
    """The runtime on this side has stopped, or is stopping."""


class ProtocolError(RpcError):
    """The peer sent something that the protocol does not allow; its connection is closed."""


class InvalidTransitionError(ProtocolError):
    """An event came that the state of an object does not allow, by a fault of a peer or of this process."""


class MessageTooLarge(SerializationError, ProtocolError):
    """A message over the limit, raised at its sender: nothing was sent."""


class AuthenticationError(ProtocolError):
    """The peer does not have this cluster's secret, or belongs to another cluster."""


class VersionMismatch(ProtocolError):
    """Two processes that cannot work together; raised on both. `mine` and `theirs` name the versions."""

    def __init__(self, mine: str, theirs: str, who: str = "the peer") -> None:
        super().__init__(mine, theirs, who)
        self.mine, self.theirs, self.who = mine, theirs, who

    def __str__(self) -> str:
        return (
            f"this process has {self.mine}; {self.who} has {self.theirs}. "
            "Use the same rpcbench and the same minor version of Python for all workers of a world"
        )


class RefusedError(ProtocolError):
    """Another member has identified this process and refuses it, for the reason in the text.

    `again`: another member may admit it, or the same one later.
    """

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text, again)
        self.again = again

    def __str__(self) -> str:
        return str(self.args[0])


class TurnedAwayError(RpcError):
    """The member asked for admission to a world is not its leader any more: another is, or the world is over."""


class NamesError(RuntimeError):
    """Names of dimensions that do not match, or that an operator cannot keep."""


class PipelineError(ValueError):
    """A split or schedule that cannot run, with the place that is wrong."""
