from __future__ import annotations

import pickle

import pytest

from rpcbench.base import errors
from rpcbench.base.config import WorldConfig
from rpcbench.base.ids import Counter, Id, apply_change, check_name, global_id, worker_of


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 128, "a/b", "é"])
def test_an_invalid_worker_name_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"must be non-empty|shorter than 128|must match"):
        check_name(name)


@pytest.mark.parametrize("name", ["worker1", "a-b_c:d.e", "x" * 127])
def test_a_valid_worker_name_is_accepted(name: str) -> None:
    assert check_name(name) == name


def test_ids_contain_their_worker_and_counters_count_from_zero() -> None:
    assert worker_of(global_id(3, 7)) == 3 and global_id(0, 7) == 7
    assert Id(1, 2) != Id(1, 2, 1) and (str(Id(1, 2)), str(Id(1, 2, 1))) == ("1.2", "1.2.1")
    counter = Counter()
    assert [counter.next() for _ in range(3)] == [0, 1, 2]


def test_a_configuration_survives_json_and_its_repr_hides_the_secret() -> None:
    config = WorldConfig("worker1", 1, "c", "/d", b"\x01secret", incarnation=2, world_size=3)
    assert WorldConfig.from_json(config.to_json()) == config
    assert "secret" not in repr(config)


def test_errors_have_the_base_classes_of_torch_and_can_be_pickled() -> None:
    assert issubclass(errors.RpcTimeoutError, TimeoutError) and issubclass(errors.RpcError, RuntimeError)
    remote = pickle.loads(pickle.dumps(errors.RemoteError("worker1", "Traceback …")))
    assert (remote.worker, remote.traceback) == ("worker1", "Traceback …") and "worker1" in str(remote)
    assert errors.RpcTimeoutError.maybe_executed and not errors.UnknownWorkerError.maybe_executed


def test_changes_are_applied_to_tables() -> None:
    tables: dict[str, dict[str, dict[str, int]]] = {}
    apply_change(tables, "owned", "0.1", {"forks": 1})
    apply_change(tables, "owned", "0.1", {"forks": 2})
    apply_change(tables, "owned", "0.2", {"forks": 1})
    apply_change(tables, "owned", "0.2", None)
    assert tables == {"owned": {"0.1": {"forks": 2}}}
