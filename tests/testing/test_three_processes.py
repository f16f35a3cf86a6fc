"""The reason for the ChildAccept message, in real processes: a parent drops its RRef before its child is known.

This process is the parent, worker1 the owner, worker2 the child; the request of worker2 to the owner is held.
"""

from __future__ import annotations

import pytest
import three_processes as there
from mutants import parents_do_not_wait_for_children
from worlds import cluster_fixture, until

import rpcbench
from rpcbench.base.errors import WorkerLostError
from rpcbench.base.futures import Future
from rpcbench.rpc import remote, rpc_async, rpc_sync
from rpcbench.runtime import current

pytestmark = pytest.mark.process
cluster = cluster_fixture(2, scope="function")


def share_and_drop() -> Future[list[int]]:
    """Act as the parent; worker2 waits for the delivery of its request."""
    rpc_sync("worker2", there.disturb)
    rref = remote("worker1", there.make)
    assert rref.to_here() == [1, 2, 3]
    rpc_sync("worker2", there.hold, ("ForkRequest",))
    fetched = rpc_async("worker2", there.fetch, (rref,))
    del rref
    until(lambda: rpc_sync("worker2", there.held) >= 1, "the request")  # it is sent again until it is acknowledged
    users = current.current_agent().tables
    until(lambda: all(row["state"] == "deleting" for row in users()["users"].values()), "the drop")
    return fetched


def test_a_value_lives_while_the_fork_request_of_a_user_is_in_flight(cluster: rpcbench.Cluster) -> None:
    fetched = share_and_drop()
    assert rpc_sync("worker1", there.owned) == 1
    rpc_sync("worker2", there.release)
    assert fetched.wait() == [1, 2, 3]
    until(lambda: rpc_sync("worker1", there.owned) == 0, "the end of the value")
    kinds = ["ForkRequest", "ForkAccept", "ChildAccept", "UserDelete"]
    told = [kind for line in rpc_sync("worker2", there.history) for kind in kinds if f" {kind}(" in line]
    assert list(dict.fromkeys(told)) == kinds


def test_a_value_is_lost_if_the_parent_does_not_wait_for_child_accept(
    cluster: rpcbench.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents_do_not_wait_for_children(monkeypatch)
    for worker in cluster.workers:
        rpc_sync(worker, there.break_child_accept)
    fetched = share_and_drop()
    # A thread there may still have the value for a moment after its last user.
    until(lambda: rpc_sync("worker1", there.owned) == rpc_sync("worker1", there.remembered) == 0, "the loss of it")
    rpc_sync("worker2", there.release)
    with pytest.raises(WorkerLostError, match=r"RRef .* has no value"):
        fetched.wait()
