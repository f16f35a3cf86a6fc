"""The simulator of lesson 37: times and bytes that can be computed by hand, and each mistake with its line."""

from __future__ import annotations

import itertools
import sys
import threading
from xml.etree import ElementTree

import pytest
from exercises import LESSONS

sys.path.insert(0, str(LESSONS))

import budgets
import step_pictures
from one_step import Rank, play
from step_records import StepError, World
from turns import Turns

GIVEN = {"weights", "states"}


def compute(rank: Rank) -> None:
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            rank.forward(layer, microbatch)
        for layer in reversed(rank.layers):
            rank.backward(layer, microbatch)


def plain(rank: Rank) -> None:
    compute(rank)
    for layer in rank.layers:
        rank.all_reduce("gradients", layer)
    for layer in rank.layers:
        rank.update(layer)


def forward_stage(rank: Rank, microbatch: int) -> None:
    if rank.previous is not None:
        rank.receive("input", rank.layers[0], microbatch, rank.previous)
    rank.forward(rank.layers[0], microbatch)
    if rank.next is not None:
        rank.send("input", rank.layers[0] + 1, microbatch, rank.next)


def backward_stage(rank: Rank, microbatch: int) -> None:
    if rank.next is not None:
        rank.receive("input gradient", rank.layers[0] + 1, microbatch, rank.next)
    rank.backward(rank.layers[0], microbatch)
    if rank.previous is not None:
        rank.send("input gradient", rank.layers[0], microbatch, rank.previous)


def gpipe(rank: Rank) -> None:
    for stage in (forward_stage, backward_stage):
        for microbatch in rank.microbatches:
            stage(rank, microbatch)
    rank.update(rank.layers[0])


def test_a_step_on_one_rank_takes_the_sum_of_its_operations():
    world = World(replicas=1, microbatches=2)
    run = play(plain, world)
    assert run.time == pytest.approx(4 * (2 * 2 + 2 * 4 + 0.4))
    assert sum(run.sent(0).values()) == 0
    assert run.fullest(0).kinds.keys() >= GIVEN
    assert sum(run.memory(0)[-1][1].values()) == 4 * (8 + 16)  # nothing is left of gradients and activations


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_all_reduce_takes_the_time_and_the_bytes_of_a_ring(ranks):
    world = World(replicas=ranks, microbatches=ranks, layers=1, alpha=0.5, beta=2)
    run = play(plain, world)
    (ring,) = (bar for bar in run.bars if bar.rank == 0 and bar.lane == "network")
    assert ring.end - ring.begin == pytest.approx(2 * (ranks - 1) * (0.5 + 8 / ranks / 2))
    assert run.sent(0) == {"all_reduce": pytest.approx(2 * (ranks - 1) / ranks * 8)}
    assert run.time == pytest.approx(2 + 4 + ring.end - ring.begin + 0.4)


def test_a_line_carries_one_collective_at_a_time_and_the_rank_computes_meanwhile():
    def early(rank):
        (microbatch,) = rank.microbatches
        for layer in rank.layers:
            rank.forward(layer, microbatch)
        for layer in reversed(rank.layers):
            rank.backward(layer, microbatch)
            rank.all_reduce("gradients", layer)
        for layer in reversed(rank.layers):
            rank.update(layer)

    run = play(early, World(beta=1))  # all-reduces that are longer than backward
    lines = [bar for bar in run.bars if bar.rank == 2 and bar.lane == "network"]
    assert [bar.name.layer for bar in lines] == [3, 2, 1, 0]
    assert all(one.end == next_one.begin for one, next_one in itertools.pairwise(lines))
    assert lines[0].begin == 8 + 4
    assert run.time == pytest.approx(12 + 4 * 6 * (0.1 + 2) + 0.4)


def test_a_shard_is_a_part_of_the_memory_and_of_the_time_of_an_update():
    def zero(rank):
        (microbatch,) = rank.microbatches
        rank.all_gather("weights", 0)
        rank.forward(0, microbatch)
        rank.backward(0, microbatch)
        rank.free("weights", 0)
        rank.reduce_scatter("gradients", 0)
        rank.update(0)

    run = play(zero, World(layers=1, zero=3))
    (_, before, _), *_, (_, after, _) = run.memory(1)
    assert before == {"weights": 2}
    assert {kind: size for kind, size in after.items() if size} == {"weights": 2, "states": 4}
    assert run.fullest(1).kinds == {"weights": 2, "states": 4, "gathered": 8, "kept": 2, "gradients": 8}
    update = next(bar for bar in run.bars if bar.rank == 1 and bar.call == "update")
    assert update.end - update.begin == pytest.approx(0.1)
    assert run.time == pytest.approx(1.8 + 2 + 4 + 1.8 + 0.1)


def test_a_pipeline_sends_inputs_and_their_gradients():
    run = play(gpipe, World(stages=4, replicas=1, microbatches=3))
    assert [sum(run.sent(rank).values()) for rank in range(4)] == [3, 6, 6, 3]
    hop = 0.1 + 1 / 4
    assert run.time == pytest.approx(4 * (2 + 4) + 6 * hop + 2 * (2 + 4) + 0.4)
    assert max(kinds["kept"] for _, kinds, _ in run.memory(3) if "kept" in kinds) == 6


def test_what_has_arrived_takes_memory_before_it_is_received():
    def late(rank):
        if rank.number == 0:
            for microbatch in rank.microbatches:
                forward_stage(rank, microbatch)
            for microbatch in rank.microbatches:
                backward_stage(rank, microbatch)
        else:
            for microbatch in rank.microbatches:
                forward_stage(rank, microbatch)
                backward_stage(rank, microbatch)
        rank.update(rank.layers[0])

    run = play(late, World(stages=2, replicas=1, layers=2, microbatches=4))
    assert max(kinds.get("inputs", 0) for _, kinds, _ in run.memory(1)) >= 3


def test_the_lesson_names_the_limits_of_each_level():
    text = (LESSONS / "37_under_a_budget.ipynb").read_text().replace('\\n",\n    "', " ")
    for name in ("early", "zero1", "zero2", "zero3", "pipeline", "both", "order"):
        level = getattr(budgets, name.upper())
        limits = f"{level.memory} MB of memory, {level.sent} MB sent, {level.time} ms."
        assert limits in text.partition(f"`{name}(rank)`")[2].partition("exercise:")[0], name


def test_runs_are_all_alike():
    runs = [play(gpipe, World(stages=4, replicas=1, microbatches=8)) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_a_picture_has_the_memory_of_the_fullest_rank_and_two_lanes_of_each():
    run = play(gpipe, World(stages=2, replicas=1, layers=2, microbatches=4))
    drawing = step_pictures.draw_run(run, 40)
    texts = [node.text for node in ElementTree.fromstring(drawing.svg).iter() if node.tag.endswith("}text")]
    assert texts[0] == f"Memory of rank 0: at most {run.fullest(0).size:g} of 40 MB. The step takes {run.time:g} ms."
    assert {"40 MB", "states", "kept", "rank 1", "forward", "send", "ms"} <= set(texts)
    assert "rank 1: at most" in drawing.words and "send 3" in drawing.words


def test_a_picture_of_a_step_that_fails_ends_where_it_has_failed():
    with pytest.raises(StepError) as error:
        play(keep_gradients, World())
    run = error.value.run
    assert step_pictures.draw_run(run).words.startswith(f"The step fails after {run.time:.4g} ms.")


def failed(step, world: World = World()) -> str:  # noqa: B008
    with pytest.raises(StepError) as error:
        play(step, world)
    assert error.value.run.world == world
    return str(error.value)


def test_a_mistake_is_named_with_its_line():
    def partial(rank):
        compute(rank)
        rank.update(3)  # too early

    line = partial.__code__.co_firstlineno + 2
    told = failed(partial)
    assert told.startswith(f"Rank 0, line {line}, `rank.update(3)  # too early`: the gradient of layer 3 is partial.")
    assert "In its sum: micro-batch 0; not in it: micro-batches 1, 2, 3. It was not summed over the ranks." in told


def test_a_micro_batch_that_the_rank_has_left_out_is_named():
    def first_alone(rank):
        for layer in rank.layers:
            rank.forward(layer, 0)
        rank.backward(3, 0)
        rank.update(3)

    told = failed(first_alone, World(replicas=1, microbatches=2))
    assert told.endswith("Backward has not added micro-batch 1, which this rank has itself.")


def free_twice(rank):
    rank.free("weights", 2)
    rank.free("weights", 2)


def use_after_free(rank):
    rank.free("weights", 0)
    rank.forward(0, rank.microbatches[0])


def forward_twice(rank):
    rank.forward(0, rank.microbatches[0])
    rank.forward(0, rank.microbatches[0])


def skip_a_layer(rank):
    rank.forward(1, rank.microbatches[0])


def backward_twice(rank):
    compute(rank)
    rank.backward(3, rank.microbatches[0])


def reduce_twice(rank):
    compute(rank)
    rank.all_reduce("gradients", 0)
    rank.all_reduce("gradients", 0)
    rank.update(0)


def go_on_with_new_weights(rank):
    plain(rank)
    rank.forward(0, rank.microbatches[0])


def keep_gradients(rank):
    compute(rank)
    for layer in rank.layers:
        rank.all_reduce("gradients", layer)
    for layer in rank.layers[1:]:
        rank.update(layer)


def lose_states(rank):
    plain(rank)
    rank.free("states", 1)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (free_twice, "the weights of layer 2 are not there: freed in line"),
        (use_after_free, "the weights of layer 0 are not there: freed in line"),
        (forward_twice, "layer 0 has run forward for micro-batch 0 before"),
        (skip_a_layer, "the input of layer 1 for micro-batch 0 is not there: forward of layer 0 has not run"),
        (backward_twice, "what layer 3 has kept for micro-batch 0 is not there: used up by backward in line"),
        (reduce_twice, "this sum counts micro-batches 0, 1, 2, 3 more than once"),
        (go_on_with_new_weights, "the weights of layer 0 have been updated already; this forward needs the old ones"),
        (keep_gradients, "rank 0 does not have the new weights of layer 0: they are the old ones"),
        (lose_states, "rank 0 has lost the states of layer 1"),
        (lambda rank: rank.forward(4, 0), "layer 4 is not one of this rank; it has 0, 1, 2, 3"),
        (lambda rank: rank.forward(0, 4), "4 is no micro-batch of this rank; it has 0"),
        (lambda rank: rank.all_gather("gradients", 0), "all_gather takes 'weights', not 'gradients'"),
        (lambda rank: rank.send("input", 1, rank.microbatches[0], 1), "send names rank 1; the neighbours are none"),
    ],
)
def test_each_mistake_has_its_words(step, told):
    assert told in failed(step)


def test_a_program_that_does_not_end_is_stopped():
    def never_end(rank):
        while True:
            rank.all_gather("weights", 0)

    told = failed(never_end, World(replicas=1, microbatches=1))
    assert told.endswith("the rank has made 2,000 calls, more than any step needs.")


def test_weights_that_are_gathered_do_not_outlive_the_step():
    def greedy(rank):
        rank.all_gather("weights", 0)
        compute(rank)
        rank.reduce_scatter("gradients", 0)
        rank.update(0)

    assert "holds the weights of layer 0, whole" in failed(greedy, World(layers=1, zero=3))


def test_new_parts_must_be_gathered():
    def alone(rank):
        compute(rank)
        rank.reduce_scatter("gradients", 0)
        rank.update(0)

    told = "rank 0 does not have the new weights of layer 0: of 4 parts only 0 is new"
    assert told in failed(alone, World(layers=1, zero=1))


def test_a_deadlock_is_named_rank_by_rank():
    def crossed(rank):
        if rank.number == 0:
            rank.receive("input gradient", 1, 0, 1)
        else:
            rank.receive("input", 1, 0, 0)

    told = failed(crossed, World(stages=2, replicas=1, layers=2, microbatches=1))
    first = crossed.__code__.co_firstlineno
    assert told == (
        f'Deadlock: rank 0 waits at line {first + 2}, `rank.receive("input gradient", 1, 0, 1)`, for the input '
        f"gradient of layer 1 for micro-batch 0 from rank 1; rank 1 waits at line {first + 4}, "
        '`rank.receive("input", 1, 0, 0)`, '
        "for the input of layer 1 for micro-batch 0 from rank 0; rank 0 waits already, so none can go on."
    )


def test_a_rank_that_has_left_a_collective_out_is_named():
    def absent(rank):
        compute(rank)
        if rank.number != 2:
            rank.all_reduce("gradients", 0)
            rank.update(0)

    line = absent.__code__.co_firstlineno + 4
    assert failed(absent, World(layers=1)) == (
        f"Deadlock: rank 0 waits at line {line}, `rank.update(0)`, for all_reduce of the gradients of layer 0; "
        "rank 2 has ended its step."
    )


def test_different_collectives_are_named():
    def mixed(rank):
        compute(rank)
        if rank.number == 3:
            rank.reduce_scatter("gradients", 0)
        rank.all_reduce("gradients", 1)

    told = failed(mixed, World(layers=2))
    assert "Rank 3" in told and "Number 1 of this rank is reduce_scatter of the gradients of layer 0" in told
    assert "of rank 0 it is all_reduce of the gradients of layer 1" in told


def test_a_message_that_is_not_sent_is_waited_for():
    def step(rank):
        forward_stage(rank, 0)
        if rank.number == 0:
            backward_stage(rank, 0)
        else:
            rank.backward(1, 0)
        rank.update(rank.number)

    told = failed(step, World(stages=2, replicas=1, layers=2, microbatches=1))
    assert told.endswith("for the input gradient of layer 1 for micro-batch 0 from rank 1; rank 1 has ended its step.")


def test_a_message_waits_behind_the_collective_that_its_sender_has_asked_for_before():
    def step(rank):
        first = rank.microbatches[0]
        if rank.number != 1:
            forward_stage(rank, first)
        if rank.number == 0:
            rank.receive("input gradient", 1, first, 2)
        if rank.stage == 1:
            rank.backward(1, first)
            rank.all_reduce("gradients", 1)
            rank.send("input gradient", 1, first, rank.previous)

    told = failed(step, World(stages=2, replicas=2, layers=2, microbatches=2))
    assert "from rank 2, which comes after all_reduce of the gradients of layer 1; rank 3 waits at line" in told
    assert told.endswith("for the input of layer 1 for micro-batch 1 from rank 1; rank 1 has ended its step.")


def test_an_error_of_the_program_itself_comes_through_and_no_thread_stays():
    def broken(rank):
        if rank.number == 2:
            raise ZeroDivisionError
        rank.all_gather("weights", 0)
        rank.free("weights", 0)

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        play(broken, World())
    assert threading.active_count() == before


def test_programs_take_turns_in_the_order_of_their_numbers():
    log: list[str] = []
    there: set[int] = set()

    def program(number):
        def run():
            log.append(f"{number} begins")
            turns.wait(number, lambda: number == 2 or number + 1 in there)
            there.add(number)
            log.append(f"{number} ends")

        return run

    turns = Turns(lambda number: RuntimeError(f"{number} waits"))
    turns.run([program(number) for number in range(3)])
    assert log == ["0 begins", "1 begins", "2 begins", "2 ends", "1 ends", "0 ends"]
    stuck = Turns(lambda number: RuntimeError(f"{number} waits"))
    with pytest.raises(RuntimeError, match=r"^0 waits$"):
        stuck.run([lambda: stuck.wait(0, lambda: False), lambda: None])
