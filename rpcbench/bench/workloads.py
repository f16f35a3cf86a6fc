"""The work that both pairs are measured on, by title, with its goals: one row of the table each."""

from __future__ import annotations

from rpcbench.bench import calls, naming, payloads, plain, training
from rpcbench.bench.goals import BARE, HOSTS, OURS, PLAIN, Goal, Row, Workload
from rpcbench.bench.payloads import KB, MB
from rpcbench.bench.sides import RREFS, TRAINING

SMALL = "function returning an int"
LOOP = "send 128 MB in a plain loop, between hosts"

WORKLOADS: dict[str, Workload] = {
    SMALL: Workload(calls.int_call, Row(Goal(2))),
    "function on two tiny tensors": Workload(calls.python_on_tensors, Row(Goal(2))),
    "torch.add on tiny tensors": Workload(calls.torch_add, Row(Goal(1.2))),
    "remote + to_here": Workload(calls.remote_value, Row(Goal(1.3)), needs=RREFS),
    "method through an RRef": Workload(calls.method, Row(Goal(2.5)), needs=RREFS),
    "1 in flight, per call": Workload(calls.in_flight(1), Row(Goal(1.7))),
    "16 in flight, per call": Workload(calls.in_flight(16), Row(Goal(3.5))),
    "256 in flight, per call": Workload(calls.in_flight(256), Row(Goal(3))),
    "echo 1 KB": Workload(payloads.echo(KB), Row(Goal(1.7))),
    "echo 64 KB": Workload(payloads.echo(64 * KB), Row(Goal(1.7))),
    "echo 1 MB": Workload(payloads.echo(MB), Row(Goal(1.7))),
    "echo 16 MB": Workload(payloads.echo(16 * MB), Row(Goal(1.5))),
    "echo 128 MB": Workload(payloads.echo(128 * MB), Row(Goal(4))),
    "send 16 MB, int back": Workload(payloads.send(16 * MB), Row(Goal(1.3))),
    "context + backward, d=16": Workload(training.backward(16, 4), Row(Goal(1.15)), needs=TRAINING),
    "context + backward, d=128": Workload(training.backward(128, 32), Row(Goal(1.1)), needs=TRAINING),
    "context + backward, d=512": Workload(training.backward(512, 64), Row(Goal(1.05)), needs=TRAINING),
    "optimizer step, 6 + 6 parameters": Workload(training.step(16, 4), Row(Goal(1.15)), needs=TRAINING),
    "beside a busy thread, 99th percentile": Workload(
        calls.beside_busy_thread, Row(Goal(most=1e-3), quantile=0.99), needs=RREFS
    ),
    "with a panel open": Workload(calls.panel_open, Row(Goal(most=1.2, of=SMALL)), on=OURS),
    "operation on a named tensor": Workload(naming.operations, Row(Goal(most=15e-6)), on=OURS),
    f"{SMALL}, between hosts": Workload(calls.int_call, Row(Goal(most=1.5, of=SMALL)), on=HOSTS),
    "send 128 MB, between hosts": Workload(payloads.send(128 * MB), Row(Goal(most=1.25, of=LOOP)), on=HOSTS),
    LOOP: Workload(plain.send(128 * MB), Row(Goal()), on=PLAIN),
    "a word there and back between two bare processes": Workload(plain.word, Row(Goal()), on=BARE),
    "both stages' backward in one process, d=16": Workload(training.alone(16, 4), Row(Goal()), on=OURS),
    "both stages' backward in one process, d=128": Workload(training.alone(128, 32), Row(Goal()), on=OURS),
    "both stages' backward in one process, d=512": Workload(training.alone(512, 64), Row(Goal()), on=OURS),
}
