"""Judges verdicts on the mysteries of `slow_jobs`, for lesson 32 and the exam. Faults are asked of that module.

What a wrong verdict is told is true, and leads on: a sentence on the worker and the kind that it names.
"""

from __future__ import annotations

from typing import Any

from slow_jobs import EVERY, JOBS, OF_EVERY, WORKERS, Fault

from checks import DOTS, NotYet, read, require, shown

KINDS = tuple(dict.fromkeys(kind for kinds in JOBS.values() for kind in kinds))
WAITS = "{worker} waits in an all-reduce for another rank, and a rank that waits is not the cause."
ARRIVES = "What {worker} sends arrives at once."
ANSWERS = "{worker} makes no calls. It answers those of another worker."

HEALTHY = {  # what is seen where a job has not this fault, or this worker has it not
    "training": {
        "straggler": "The others call every operator that {worker} calls.",
        "uneven data": "In a step {worker} runs forward and backward as often as the others do.",
        "slow loader": "No stack of {worker} shows a line that waits for a disk.",
        "small messages": "A step has one all-reduce, with all gradients in it.",
        "hang": "{worker} comes to each all-reduce.",
    },
    "pipeline": {
        "bubble": "The schedule alone leaves less than a third of the time idle; much more is measured.",
        "imbalance": "The operations of {worker} take as long as those of most others.",
        "slow link": ARRIVES,
    },
    "lookup": {
        "straggler": "No answer takes {worker} more than a few operators.",
        "slow link": ARRIVES,
        "serial calls": "{worker} begins all its calls before it waits for the first answer.",
    },
}
REMEDIES = {
    "straggler": "One call for all numbers, in place of one for each, would mend it.",
    "uneven data": "Share the data so that each rank has as many batches: nobody needs to do more than the others.",
    "slow loader": "No operator of torch shows that. Load the next batch in another process, while this one computes.",
    "small messages": "Each all-reduce costs its latency. Gradients in buckets share it.",
    "hang": "Each rank must come to each collective, whatever its data say.",
    "bubble": "More micro-batches, or another schedule.",
    "imbalance": "Cut the model elsewhere, so that all stages take as long.",
    "slow link": "The network, or fewer and larger messages on it.",
    "serial calls": "Begin all calls, then wait for all: a future for each.",
}


def judge_verdict(fault: Fault, answer: Any) -> str:
    """Return the remedy of the fault if the answer names it: its worker and its kind. Raises NotYet otherwise."""
    worker, kind = _read_verdict(answer)
    require(kind in JOBS[fault.job], f"This is a {fault.job} job, and {kind!r} is no fault of such a job.")
    if (worker, kind) == (fault.worker, fault.kind):
        return REMEDIES[kind]
    if worker == fault.worker != EVERY:
        raise NotYet(f"The worker is right, the kind is not. {_why_not(fault, worker, kind)}")
    raise NotYet(_why_not(fault, worker, kind))


def _read_verdict(answer: Any) -> tuple[str, str]:
    require(answer is not ..., f"Nothing is written down so far. {DOTS}")
    worker, kind = read(answer, (str, str), "A worker and a kind are wanted, in a tuple")
    there = ", ".join(map(repr, (*WORKERS, EVERY)))
    require(worker in (*WORKERS, EVERY), f"The worker is one of {there}, not {shown(worker)}.")
    require(kind in KINDS, f"The kinds are {', '.join(map(repr, KINDS))}; {shown(kind)} is none.")
    require(worker == EVERY or kind not in OF_EVERY, f"{kind!r} is a fault of the whole program: it goes with 'all'.")
    require(worker != EVERY or kind in OF_EVERY, f"{kind!r} is a fault of one worker: name it.")
    return worker, kind


def _why_not(fault: Fault, worker: str, kind: str) -> str:
    told = HEALTHY[fault.job][kind]
    if fault.job == "training" and EVERY not in (worker, fault.worker) and worker != fault.worker:
        told = WAITS
    if kind == "serial calls" and worker != fault.asks:
        told = ANSWERS
    return told.format(worker=worker)
