"""`python -m benchmarks`, in the checkout: reads the arguments, then imports what the benchmark needs."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rpcbench.base.errors import RpcError

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except RpcError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Time our RPC and another one on the same work, in one run."
    )
    parser.add_argument("--against", choices=["torch", "ray", "monarch"], default="torch", help="the other side")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only rows with this in the title")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="batches of each workload on each side")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs")
    parser.add_argument("--soak", action="store_true", help="instead: many calls and RRefs, and whether memory grows")
    parser.add_argument("--scaling", action="store_true", help="instead: how cost grows with payloads, workers, RRefs")
    parser.add_argument("--notebook", action="store_true", help="instead: how long a user of the notebook waits")
    parser.add_argument("--counts", action="store_true", help="instead: messages, switches, CPU and calls of each deed")
    parser.add_argument("--panels", action="store_true", help="instead: the cost of open panels, and frames a second")
    parser.add_argument("--pipeline", action="store_true", help="instead: pipelines beside torch's, and the simulator")
    parser.add_argument("--kind", choices=["process", "kernel"], default="process", help="of workers, with --notebook")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="instead: notebooks of other libraries beside ours")
    parser.add_argument("--seed", type=int, help="repeat the draws of an earlier run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also plot the ratios here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also put the table into this file")
    parser.add_argument(
        "--columns", nargs="+", type=Path, metavar="JSON", help="instead: put the files of --json side by side"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number from 1 up")
    return number


def _run(options: argparse.Namespace) -> None:
    from benchmarks import command, soak

    files = command.Files(options.json, options.svg, options.markdown)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    if options.soak:
        soak.without_caches()
        command.run_soak(quick=options.quick)
    elif options.columns:
        command.run_columns(options.columns, files=files)
    elif options.peers is not None:
        command.run_peers(options.peers, quick=options.quick, files=files)
    elif options.scaling:
        command.run_scaling(quick=options.quick, files=files)
    elif options.counts:
        command.run_counts(against=options.against, quick=options.quick, only=options.only, seed=seed, files=files)
    elif options.panels:
        command.run_panels(quick=options.quick, files=files)
    elif options.pipeline:
        command.run_pipelines(quick=options.quick, seed=seed, files=files)
    elif options.notebook:
        command.run_notebook(quick=options.quick, seed=seed, kind=options.kind, files=files)
    else:
        command.run(
            against=options.against, seed=seed, quick=options.quick, rounds=options.rounds, only=options.only,
            files=files,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
