"""The table by process group: collectives, bytes, seconds and exposed seconds, of traces that are known exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_traces import Event, cpu_job, kernel, trace_of, write_job
from test_profile import made_of, op

import rpcbench
from rpcbench.telemetry.profile_files import TracedProfile

GROUPS = [
    {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
    {"pg_name": "1", "pg_desc": "mesh_dp", "ranks": [0, 2]},
    {"pg_name": "3", "pg_desc": "mesh_tp", "ranks": [0, 1]},
]


def sent(group: str, label: str, ranks: str, begin: float, end: float, **more: Any) -> Event:
    about = {
        "Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float", "Process Group Name": group,
        "Process Group Description": label, "Process Group Ranks": ranks, **more,
    }  # fmt: skip
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin, end, 20 + int(group), **about)


def opened(folder: Path, events: list[Event], groups: list[dict[str, Any]] | None = None) -> TracedProfile:
    trace = trace_of(0, 1, events)
    if groups is not None:
        trace["distributedInfo"] |= {"world_size": 1, "pg_config": groups}
    found: TracedProfile = rpcbench.profile.open(write_job(folder, [trace]))
    return found


def mesh() -> list[Event]:
    """2 dp collectives, 3 tp ones of which two overlap, and a gemm from 1 to 3 ms; the last kernel ends at 10 ms."""
    return [
        kernel("gemm", 1000, 3000, 7),
        sent("1", "mesh_dp", "[0, 2]", 0, 2000),  # 1 ms exposed
        sent("1", "mesh_dp", "[0, 2]", 6000, 10000),
        sent("3", "mesh_tp", "[0, 1]", 2000, 4000),  # 1 ms exposed
        sent("3", "mesh_tp", "[0, 1]", 5000, 6000),
        sent("3", "mesh_tp", "[0, 1]", 5500, 6500),
    ]


def summary(found: Any) -> dict[str, tuple[Any, ...]]:
    return {
        row["group"]: (row["collectives"], row["bytes"], round(row["seconds"] * 1e3, 6), round(row["exposed"] * 1e3, 6))
        for row in found.table(by="group").rows
    }


def test_each_dimension_of_a_mesh_has_its_collectives_bytes_and_exposed_seconds(tmp_path: Path) -> None:
    found = opened(tmp_path, mesh())
    assert summary(found) == {"mesh_dp": (2, 8000, 6, 5), "mesh_tp": (3, 12000, 3.5, 2.5)}
    head, dp, tp = (line.split("  ") for line in repr(found.table(by="group")).splitlines())
    assert [cell.strip() for cell in dp if cell] == [
        "mesh_dp", "rank 0", "rank 0, rank 2", "2", "8.0 kB", "6.00 ms (60%)", "5.00 ms (50%)"
    ]  # fmt: skip
    assert found.table(by="group").rows[1]["members"] == ["rank 0", "rank 1"]
    assert head[0] == "group" and tp[0] == "mesh_tp"


def test_ranks_and_descriptions_are_taken_from_the_list_of_groups_where_an_event_lacks_them(tmp_path: Path) -> None:
    found = opened(tmp_path, [sent("1", "", "[0, 1, ..., 9]", 0, 2000)], GROUPS)
    (row,) = found.table(by="group").rows
    assert (row["group"], row["members"]) == ("mesh_dp", ["rank 0", "rank 2"])


def test_bytes_that_are_unknown_are_said_to_be(tmp_path: Path) -> None:
    unknown = sent("0", "default_pg", "[0]", 0, 1000, dtype="Odd")
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert "world  rank 0  rank 0   1            ?  " in repr(opened(one, [unknown]).table(by="group"))
    both = opened(two, [unknown, sent("0", "default_pg", "[0]", 2000, 3000)]).table(by="group")
    assert both.rows[0]["bytes"] == 4000 and "≥ 4.0 kB" in repr(both)


def test_gloo_does_not_say_the_group(tmp_path: Path) -> None:
    found = rpcbench.profile.open(write_job(tmp_path, cpu_job()))
    assert summary(found) == {"not said by the trace": (1, 4000, 1.8, 1.8)}  # of the slow rank, the last of both
    fast, slow = found.table(by="group").rows
    assert (fast["worker"], round(fast["seconds"] * 1e3, 6), slow["members"]) == ("rank 0", 5.8, [])


@pytest.mark.parametrize("several", [False, True])
def test_a_collective_of_the_only_group_is_of_that_and_of_several_it_is_not_matched(
    tmp_path: Path, several: bool
) -> None:
    traces = cpu_job()
    for trace in traces:
        trace["distributedInfo"]["pg_config"] = GROUPS if several else GROUPS[:1]
    found = rpcbench.profile.open(write_job(tmp_path, traces))
    if not several:
        assert found.remarks == [] and len(found.collectives.rows) == 1 and [*summary(found)] == ["world"]
        return
    assert not found.collectives.rows and [*summary(found)] == ["not said by the trace"]
    (told,) = found.remarks
    assert told.startswith("The traces do not say the groups of collectives, as with gloo, and the job has several (")
    assert "world, mesh_dp, mesh_tp" in told


def test_a_profile_of_a_cluster_counts_the_collectives_that_its_members_report() -> None:
    found = made_of(worker1=[op("mm", 10.0, 2.0)])
    row = {"group": "world", "number": 1, "op": "all_reduce", "members": ["worker1"], "shape": "", "bytes": 40,
           "begin": 11.0, "end": 14.0, "failed": False}  # fmt: skip
    found.world[0]["tables"]["collectives"] = {"a": row, "b": {**row, "begin": 15.0, "end": None}}
    assert summary(found) == {"world": (1, 40, 3000, 2000)}


def test_a_profile_without_collectives_or_operators_says_so() -> None:
    found = made_of(worker1=[])
    for by, said in [("group", "No collective has ended."), ("module", "No operator of torch ran.")]:
        assert repr(found.table(by=by)) == said and found.table(by=by)._repr_html_() == f"<div>{said}</div>"
