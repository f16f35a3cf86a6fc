"""The changes of a context that panels get: each stage, on each worker, in order; none without a listener."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import nothing_left, until, world

from rpcbench import autograd
from rpcbench.autograd import graph, graph_events
from rpcbench.base.ids import Made
from rpcbench.protocol import backward
from rpcbench.rpc import rpc_sync
from rpcbench.runtime.agent import Agent

RECORDED_HERE = ["ContextCreated", "SendRecorded", "RecvRecorded"]
RECORDED_THERE = ["ContextCreated", "RecvRecorded", "SendRecorded"]
RAN_THERE = ["GradientsArrived", "GradientsAccumulated", "GradientsSent", "WalkFinished", "ContextReleased"]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made
        nothing_left(made)


def listen(agent: Agent) -> list[str]:
    """Return a list that gets the kind of each later change of the table "contexts"."""
    heard: list[str] = []

    def note(kind: str, table: str, key: str, row: object) -> None:
        if table == "contexts":
            heard.append(kind)

    agent.machine.read_node(lambda node: node.set_observers(note))
    return heard


def work(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def one_step() -> None:
    with autograd.context() as context:
        loss = rpc_sync("worker1", work, (torch.ones(3, requires_grad=True),)).sum()
        autograd.backward(context, [loss])


def test_each_stage_of_a_context_is_reported_in_order(agents: list[Agent]) -> None:
    here, there = map(listen, agents)
    one_step()
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    assert here[:5] == [*RECORDED_HERE, "WalkBegan", "GradientsSent"]
    assert here[-4:] == ["GradientsArrived", "GradientsAccumulated", "WalkFinished", "ContextReleased"]
    assert there == RECORDED_THERE + RAN_THERE


def test_a_finished_part_of_a_pass_is_reported_while_another_waits(agents: list[Agent]) -> None:
    here, there = map(listen, agents)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        both = [rpc_sync("worker1", work, (x * factor,)) for factor in (1, 2)]
        autograd.backward(context, [torch.cat(both).sum()])
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    ran = [kind for kind in there[len(RECORDED_THERE) :] if kind in ("GradientsRan", "GradientsSent", "WalkFinished")]
    assert ran == ["GradientsSent", "GradientsRan", "GradientsSent", "WalkFinished"]
    assert here[-2:] == ["WalkFinished", "ContextReleased"]


def test_discovery_is_reported_if_messages_list_too_few_sends(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "MOST_BEHIND", 0)
    here, there = map(listen, agents)
    one_step()
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    assert here[3:8] == ["WalkMoved", "SendDiscovered", "WalkMoved", "WalkMoved", "GradientsSent"]
    assert there == [*RECORDED_THERE, "SendDiscovered", "WalkMoved", "WalkMoved", *RAN_THERE]


def test_a_failed_pass_is_reported_on_both_members(agents: list[Agent]) -> None:
    here, there = map(listen, agents)
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)  # type: ignore[arg-type, return-value]
    with autograd.context() as context, pytest.raises(ZeroDivisionError):
        autograd.backward(context, [rpc_sync("worker1", work, (x,)).sum()])
    until(lambda: bool(there) and there[-1] == "ContextReleased")
    assert here[-2:] == ["BackwardFailed", "ContextReleased"]
    assert "BackwardFailed" in there


def row(agent: Agent) -> dict[str, Any]:
    """Return the row of the only context in the table "graphs"."""
    (found,) = agent.tables()["graphs"].values()
    return found


def graphs(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return a list that gets (kind, row at that time) of each later change of the table "graphs"."""
    heard: list[tuple[str, Any]] = []

    def note(kind: str, table: str, key: str, row: Made) -> None:
        if table == "graphs":
            heard.append((kind, row()))

    monkeypatch.setattr(agent.links.bus, "record_change", note)
    agent.listen(True)
    return heard


def ended(agent: Agent) -> list[dict[str, Any]]:
    """What it tells of released contexts, oldest first."""
    return [found for found in agent.tables()["graphs"].values() if found["ended"] is not None]


def parts(told: dict[str, Any]) -> list[list[str]]:
    return [part["ops"] for part in told["parts"]]


def test_gradients_are_reported_with_shapes_and_regions_as_they_run(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (graphs(agent, monkeypatch) for agent in agents)
    x = torch.ones(2, 3, requires_grad=True)
    with autograd.context() as context:
        first, second = rpc_sync("worker1", work, (x,)), rpc_sync("worker1", work, (x,))
        assert all(row(agent)["leaves"] == row(agent)["passes"] == [] for agent in agents)
        autograd.backward(context, [(first + second).sum()])
        assert row(agents[0])["leaves"] == [{"name": "", "shape": "[2, 3]", "bytes": 24}]
        assert (row(agents[0])["more"], row(agents[0])["gradients"], row(agents[0])["context"]) == (0, 1, context)
    until(lambda: bool(there) and all(told[-1][0] == "GraphDropped" for told in (here, there)))
    ran = [one["passes"][0]["ran"] for _, one in here if one and one["passes"]]
    assert ran == sorted(ran) and ran[0] == 0 and ran[-1] == here[-3][1]["passes"][0]["regions"]
    kinds = [kind for kind, _ in here if kind not in ("RegionsRan", "GradientsCame")]
    assert kinds[-2:] == ["PassEnded", "GraphDropped"]
    assert here[-1][1]["ended"] >= here[-1][1]["made"] and here[-1][1]["passes"] == []


def test_operations_and_messages_are_told_as_they_come_and_stay_with_their_times(agents: list[Agent]) -> None:
    for agent in agents:
        agent.listen(True)
    w = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        result = rpc_sync("worker1", work, (w,))
        (sent,), (received,) = row(agents[0])["sends"], row(agents[1])["recvs"]
        assert sent == {"message": received["message"], "to": 1, "label": sent["label"], "shape": "[3]", "bytes": 12,
                        "back": None}  # fmt: skip
        assert "work" in sent["label"] and received["from"] == 0
        assert (parts(row(agents[0])), parts(row(agents[1]))) == ([["leaf"]], [["Mul"]])
        autograd.backward(context, [(result + 1).sum()])
    until(lambda: all(map(ended, agents)))
    (here,), (there,) = map(ended, agents)
    assert parts(here) == [["leaf"], ["Add", "Sum"]] and parts(there) == [["Mul"]]
    (leaf, loss), (mul,) = here["parts"], there["parts"]
    (reply,) = there["sends"]
    assert (loss["sends"], loss["recvs"]) == ([-1], [reply["message"]]) and mul["recvs"] == [sent["message"]]
    assert loss["ran"][0] <= loss["ran"][1] <= reply["back"] <= mul["ran"][0] <= mul["ran"][1]
    assert mul["ran"][1] <= here["sends"][0]["back"] <= leaf["ran"][0] <= leaf["ran"][1] <= here["ended"]


def test_rows_of_the_last_released_contexts_stay_while_somebody_watches(agents: list[Agent]) -> None:
    for agent in agents:
        agent.listen(True)
    for _ in range(graph_events.KEPT + 2):
        one_step()
    until(lambda: all(len(ended(agent)) == graph_events.KEPT for agent in agents))
    until(lambda: all(agent.tables()["contexts"] == {} for agent in agents))
    for agent in agents:
        agent.listen(False)
    one_step()
    until(lambda: all(agent.tables()["graphs"] == {} for agent in agents))


def test_a_part_that_stopped_in_the_middle_has_no_end(agents: list[Agent]) -> None:
    agents[0].listen(True)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context, pytest.raises(ZeroDivisionError):
        loss = rpc_sync("worker1", work, (x,)) * 2
        loss.register_hook(lambda grad: 1 / 0)
        autograd.backward(context, [loss.sum()])
    (told,) = ended(agents[0])
    assert [len(part["ran"]) for part in told["parts"]] == [0, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_leaves_of_each_layout_are_reported_with_shape_and_size() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    nested = [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.strided, torch.jagged)]
    leaves = [*nested, torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.half)]
    told_of = [graph_events._leaf_fields("w", leaf) for leaf in leaves]
    assert [one["shape"] for one in told_of] == ["nested", "nested", "[2, 2]", "[2]"]
    assert [one["bytes"] for one in told_of] == [0, 0, 0, 4]


def test_leaves_beyond_the_limit_of_a_row_are_counted(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_events, "MOST_LEAVES", 2)
    leaves = [torch.ones(1, requires_grad=True) for _ in range(5)]
    with autograd.context() as context:
        autograd.backward(context, [torch.cat(leaves).sum()])
        assert (len(row(agents[0])["leaves"]), row(agents[0])["more"]) == (2, 3)


def test_no_row_of_a_graph_is_made_without_a_listener(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_events.GraphEvents, "_make_row", lambda *_: pytest.fail("a row was made"))
    monkeypatch.setattr(graph_events, "SeenGraph", lambda: pytest.fail("a graph was looked at"))
    one_step()


Linear = torch.nn.Linear


def seen(*sent: tuple[int, torch.Tensor], names: Any = None) -> graph_events.SeenGraph:
    """The graph below these sends."""
    found = graph_events.SeenGraph()
    for message, tensor in sent:
        edges = graph.gradient_edges([tensor])
        kept = graph_events.SentTensors(edges, graph.find_ends(edges))
        found.add_nodes_below(message, kept, names or graph_events.LeafNames(list))
    return found


def test_a_part_is_what_leads_to_the_same_sends() -> None:
    (x,) = graph.attach_recv_node([torch.ones(2, 4, requires_grad=True)], 7)
    hidden = torch.nn.functional.relu(Linear(4, 4)(x))
    told = seen((8, hidden.sum()), (9, hidden * 2)).part_rows()
    assert [(part["sends"], part["recvs"], part["ops"]) for part in told] == [
        ([8, 9], [7], ["Linear", "Relu"]), ([8], [], ["Sum"]), ([9], [], ["Mul"]),
    ]  # fmt: skip


def test_an_operation_has_the_place_of_its_module_and_reshapes_are_left_out() -> None:
    net = torch.nn.Sequential(Linear(4, 4), torch.nn.ReLU(), Linear(4, 2, bias=False))
    names = graph_events.LeafNames(lambda: [net])
    (part,) = seen((1, net(torch.ones(2, 3, 4))), names=names).part_rows()
    assert (part["ops"], part["count"]) == (["Linear 0", "Relu", "Linear 2"], 3)
    (part,) = seen((1, next(net.parameters())), names=names).part_rows()
    assert part["ops"] == ["leaf 0.weight"]


def test_of_a_large_graph_only_the_recvs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_events, "MOST_NODES", 3)
    (x,) = graph.attach_recv_node([torch.ones(2, requires_grad=True)], 7)
    (part,) = seen((8, x * 2 * 2 * 2 * 2)).part_rows()
    assert (part["recvs"], part["ops"], part["count"]) == ([7], [], None)
    edges = graph.gradient_edges([x * 2 * 2 * 2 * 2])
    unknown = graph_events.SeenGraph()
    unknown.add_nodes_below(8, graph_events.SentTensors(edges, None), graph_events.LeafNames(list))
    assert unknown.part_rows() == []


@pytest.mark.parametrize("step", ["_graph_of_context", "_make_row", "_size_fields", "add_nodes_below", "Spans"])
def test_an_error_of_the_watching_is_logged_once_and_the_pass_goes_on(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError(step)

    place: Any = graph_events
    owners = {"add_nodes_below": graph_events.SeenGraph, "_size_fields": place, "Spans": place}
    place = owners.get(step, graph_events.GraphEvents)
    monkeypatch.setattr(place, step, fail)
    for agent in agents:
        agent.listen(True, False)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc_sync("worker1", work, (x,)).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2]
    until(lambda: bool(caplog.records))
    assert {record.getMessage()[:37] for record in caplog.records} == {"the watcher of backward passes has fa"}
    assert len(caplog.records) <= len(agents), "each member logs it once"
