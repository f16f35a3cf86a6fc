"""Every error rpcbench raises, in one tree. Each says who is at fault and what to do.

    RuntimeError
    ├── NamesError                    names of dimensions that do not fit together; see rpcbench.named
    └── RpcError                      something about a call; programs written for torch match on RuntimeError
        ├── RpcTimeoutError           (also TimeoutError) the deadline passed; the callee may still run
        ├── WorkerLostError           the other process is gone
        │   └── StageLostError        ... and stages of a pipeline with it; which, and what the others hold
        ├── ConnectionLostError       the other process is there, but a message to or from it was lost on the way
        ├── UnknownWorkerError        (also ValueError) no such worker: a typing error of the caller
        ├── NoOverloadError           (also TypeError) an operator of torch that does not take these arguments
        ├── SerializationError        (also TypeError) an argument or result that cannot travel
        │   ├── MissingCodeError      (also AttributeError) the other side lacks a function or class of the sender's
        │   └── MessageTooLarge       (also ProtocolError) more bytes or tensors than one message may carry
        ├── RemoteError               what stands behind a user's error: worker and remote traceback; its `cause`
        ├── DeadlockError             calls that wait for each other in a circle
        ├── CollectiveError           (also ValueError) ranks of a process group disagree, or one is wrong
        ├── CallCancelled             the caller, or Ctrl-C, gave the call up
        ├── NotConnectedError         the peer cannot be reached (yet)
        ├── IncompleteWorldError      who belongs to a world did not come in time; the text names who did
        ├── ShutdownError             this side has stopped, or is stopping
        ├── TurnedAwayError           who was asked to let this process into a world leads it no more: ask again
        └── ProtocolError             a peer broke the rules: nonsense bytes, an unknown message, a wrong size
            ├── AuthenticationError   a peer that does not know the secret
            ├── VersionMismatch       a peer whose Python or rpcbench cannot work with ours
            └── RefusedError          a peer that knows us, and does not let us in; it says why
    ValueError
    └── PipelineError                 a split or a schedule that cannot run; raised before anything is sent

All can be pickled: `args` are the constructor's arguments.

Phrases of messages stand here, too: a number with its noun, and the name that was meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`, `2 batches`."""
    ending = "es" if noun.endswith(("s", "x", "sh", "tch", "nch")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def nearest(word: str, there: Iterable[str]) -> str:
    """`did you mean workers? There are rrefs, workers`: what to say of a word that is none of those."""
    names = list(there)
    near = difflib.get_close_matches(word, names, 1, 0.5)
    told = f"here are {', '.join(names)}" if names else "here are none"
    return f"did you mean {near[0]}? T{told}" if near else f"t{told}"


E = TypeVar("E", bound="RpcError")
NOT_INITIALIZED = (
    "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework? Call "
    "rpcbench.rpc.init_rpc first, or start workers: rpcbench.Cluster(2), in a notebook %cluster start 2."
)
FORKED = (
    "RPC has not been initialized in this process: it is a fork of {}, without the threads and connections of that. "
    "Call init_rpc here, or start processes that need no fork: multiprocessing's spawn, or workers."
)


class RpcError(RuntimeError):
    """Root of all errors about remote calls.

    `maybe_executed` says whether the callee may have run the function: after a lost connection or a passed deadline
    nobody can know, and calls are never repeated on their own.
    """

    maybe_executed: bool = False


def never_ran(error: E) -> E:
    """Mark an error of a call that is known not to have run anywhere."""
    error.maybe_executed = False
    return error


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a call passed before the reply came."""

    maybe_executed = True


class WorkerLostError(RpcError):
    """The worker that a call, an RRef or a backward pass needs is gone.

    Source: raised on the caller when the connection ends or the worker's process exits.
    """

    maybe_executed = True


class CollectiveError(RpcError, ValueError):
    """Ranks of a process group disagree on what to do together, or one of them asked for what cannot be.

    Source: raised on every rank that takes part. The text names the rank at fault and says what each one called.
    """


class StageLostError(WorkerLostError):
    """Workers of a pipeline are gone, and their stages with them.

    `at`: worker -> what it was at, as "in B3 of stage 1"; `stages` went with them; `held`: stage -> the least and the
    most optimizer steps that it holds, or held when it went; None where nobody knows. With replicas these numbers are
    places in `pipe.stages`, which has all stages of the first replica, then those of the second.
    """

    def __init__(
        self, text: str, at: dict[str, str], stages: tuple[int, ...], held: dict[int, tuple[int, int] | None]
    ) -> None:
        super().__init__(text, at, stages, held)
        self.at, self.stages, self.held = at, stages, held

    def __str__(self) -> str:
        return str(self.args[0])


class ConnectionLostError(RpcError):
    """The connection broke, or lost a message, while a call was in flight; the worker is still there.

    `maybe_executed` is False where it is certain that the function has not run and never will: then the call may be
    made again without harm.
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
        """With torch's words, the names there are, and the one that was meant, perhaps."""
        kind = "id" if isinstance(key, int) else "name"
        return cls(f"could not find destination {kind} {key}: {nearest(str(key), there)}")


class NoOverloadError(RpcError, TypeError):
    """A call of an operator of torch with arguments that fit none of its signatures; nothing was sent."""


class SerializationError(RpcError, TypeError):
    """A value that cannot be sent, with the path to the part that is to blame."""


class RemoteError(RpcError):
    """Raised nowhere by itself: the `__cause__` of a user's error, holding the worker and the remote traceback."""

    def __init__(self, worker: str, traceback: str) -> None:
        super().__init__(worker, traceback)
        self.worker = worker
        self.traceback = traceback

    def __str__(self) -> str:
        return f"on {self.worker}:\n{self.traceback}"


class CallCancelled(RpcError):
    """The caller gave the call up; the callee was told, and may still run."""

    maybe_executed = True


class DeadlockError(RpcError):
    """Calls wait for each other in a circle, which the text shows; one of the waits was ended with this error."""

    maybe_executed = True


class NotConnectedError(RpcError):
    """No connection to the peer could be made."""


class IncompleteWorldError(RpcError):
    """A world whose members did not all come in time, or did not find worker 0."""


class ShutdownError(RpcError):
    """The runtime on this side is stopped."""


class ProtocolError(RpcError):
    """The peer sent something that the protocol does not allow; its connection is closed."""


class MessageTooLarge(SerializationError, ProtocolError):
    """A message over the limit, on the side that would send it: nothing of it has gone out."""


class AuthenticationError(ProtocolError):
    """The peer does not know this cluster's secret, or belongs to another cluster."""


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
    """Another member knows who this process is, and does not let it in. The text has its reason.

    `again`: another member may, or the same one a little later.
    """

    def __init__(self, text: str, again: bool = False) -> None:
        super().__init__(text, again)
        self.again = again

    def __str__(self) -> str:
        return str(self.args[0])


class TurnedAwayError(RpcError):
    """Who was asked to let this process into a world leads it no more; another does, or the world is over."""


class NamesError(RuntimeError):
    """Names of dimensions that do not fit together, or that an operator cannot keep."""


class PipelineError(ValueError):
    """A split or schedule that cannot run, with the place that is wrong."""
