"""`rpcbench demo | run | launch | lab | secret | bench`: reads the arguments, then imports what the subcommand needs.

Nothing heavy is imported before it is asked for, so `rpcbench --help` answers at once. An `RpcError` says itself what
to do, so it is printed without a traceback; anything else is a bug and shows where it happened.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import rpcbench
from rpcbench.base.errors import RpcError

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    own, passed_on = _split(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(own)
    options.rest = passed_on
    try:
        options.run(options)
    except RpcError as error:
        print(f"rpcbench {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those that are for the program behind the subcommand, whatever they look like."""
    passes_on = arguments[:1] in (["run"], ["launch"], ["lab"]) and arguments[1:2] not in (["-h"], ["--help"])
    return (arguments[:1], arguments[1:]) if passes_on else (arguments, [])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rpcbench", description="A Jupyter workbench for distributed PyTorch.")
    parser.add_argument("--version", action="version", version=f"rpcbench {rpcbench.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a two-stage pipeline on two workers, and show where the time went")
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write accuracy, seconds and idle share here")
    demo.add_argument("--epochs", type=_positive, metavar="N", help="passes over the training data")
    demo.set_defaults(run=_demo)

    run = commands.add_parser(
        "run", help="run a script written for torch.distributed.rpc, unchanged",
        usage="rpcbench run script.py [arguments]\n       rpcbench run -m module [arguments]",
    )  # fmt: skip
    run.set_defaults(run=_run)

    launch = commands.add_parser(
        "launch", help="start a script as several ranks, by torchrun",
        usage="rpcbench launch [--pass-local-rank] [torchrun's options] script.py [arguments]",
        epilog="Options as --nproc-per-node 4, --nnodes, --node-rank, --master-addr and --master-port, with - or _, "
        "are torchrun's. With --pass-local-rank each process gets --local_rank=N, as from torch.distributed 0.4.",
    )  # fmt: skip
    launch.set_defaults(run=_launch)

    lab = commands.add_parser(
        "lab", help="open JupyterLab on the notebooks", epilog="Everything after `lab` is passed on to JupyterLab."
    )
    lab.set_defaults(run=_lab)

    secret = commands.add_parser("secret", help="make the secret that workers on several hosts share")
    secret.add_argument("path", type=Path, metavar="PATH", help="the new file")
    secret.set_defaults(run=_secret)

    bench = commands.add_parser("bench", help="time our RPC and another one on the same work, in one run")
    bench.add_argument("--against", choices=["torch", "ray", "monarch"], default="torch", help="the other side")
    bench.add_argument("--only", action="append", default=[], metavar="TEXT", help="only rows with this in their title")
    bench.add_argument("--rounds", type=_positive, metavar="N", help="batches of each workload on each side")
    bench.add_argument("--quick", action="store_true", help="only see that everything runs")
    bench.add_argument("--soak", action="store_true", help="instead: many calls and RRefs, and whether memory grows")
    bench.add_argument("--scaling", action="store_true", help="instead: how cost grows with payloads, workers, RRefs")
    bench.add_argument("--notebook", action="store_true", help="instead: what a user of the notebook waits for")
    bench.add_argument("--panels", action="store_true", help="instead: what it costs to look, and frames in a browser")
    bench.add_argument("--pipeline", action="store_true", help="instead: pipelines beside torch's, and the simulator")
    bench.add_argument("--kind", choices=["process", "kernel"], default="process", help="of workers, with --notebook")
    bench.add_argument("--peers", nargs="*", metavar="NAME", help="instead: notebooks of other libraries beside ours")
    bench.add_argument("--seed", type=int, help="repeat the draws of an earlier run")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    bench.add_argument("--svg", type=Path, metavar="FILE", help="also plot the ratios here")
    bench.add_argument("--markdown", type=Path, metavar="FILE", help="also put the table into this file")
    bench.add_argument(
        "--columns", nargs="+", type=Path, metavar="JSON", help="instead: put what --json has written side by side"
    )
    bench.set_defaults(run=_bench)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number from 1 up")
    return number


def _demo(options: argparse.Namespace) -> None:
    from rpcbench.cli import demo

    demo.run(json_file=options.json, epochs=options.epochs)


def _run(options: argparse.Namespace) -> None:
    from rpcbench.cli import run

    run.run(options.rest)


def _launch(options: argparse.Namespace) -> None:
    from rpcbench.cli import launch

    launch.run(options.rest)


def _lab(options: argparse.Namespace) -> None:
    from rpcbench.cli import lab

    lab.run(options.rest)


def _secret(options: argparse.Namespace) -> None:
    from rpcbench.transport import run_dir

    path = options.path.expanduser().absolute()
    try:
        run_dir.make_secret(path)
    except OSError as error:
        raise RpcError(f"cannot make {path}: {error.strerror}") from error
    print(f"Made {path}. Copy it to every host, and set {run_dir.SECRET_VARIABLE}={path} for every worker.")


def _bench(options: argparse.Namespace) -> None:
    from rpcbench.bench import command, soak

    if options.soak:
        soak.without_caches()
        command.run_soak(quick=options.quick)
        return
    files = command.Files(options.json, options.svg, options.markdown)
    if options.columns:
        command.run_columns(options.columns, files=files)
        return
    if options.peers is not None:
        command.run_peers(options.peers, quick=options.quick, files=files)
        return
    if options.scaling:
        command.run_scaling(quick=options.quick, files=files)
        return
    if options.panels:
        command.run_panels(quick=options.quick, files=files)
        return
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    if options.pipeline:
        command.run_pipelines(quick=options.quick, seed=seed, files=files)
        return
    if options.notebook:
        command.run_notebook(quick=options.quick, seed=seed, kind=options.kind, files=files)
        return
    command.run(
        against=options.against, seed=seed, quick=options.quick, rounds=options.rounds, only=options.only,
        files=files,
    )  # fmt: skip
