"""`rpcbench demo | lessons | lab | run | launch | state | open | simulate | secret`: parses arguments, and calls it.

`python -m rpcbench` is the same. No heavy module is imported before it is needed, so `rpcbench --help` is fast. An
`RpcError` explains itself, so it is printed without a traceback; any other error is a bug and has one. `run` and `lab`
replace this process by the program, with its signals, exit status and output.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import rpcbench
from rpcbench.base.errors import ChoiceError, RpcError
from rpcbench.cli import find_conflict

_INTERRUPTED = 130  # exit status after Ctrl-C: 128 + SIGINT
_START = "--ServerApp.tornado_settings={'page_config_data': {'rpcbenchStart': 'yes'}}"  # for `extension/src/pages.ts`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status."""
    if warning := find_conflict():
        print(f"rpcbench: {warning}", file=sys.stderr)
    own, passed_on = _split_arguments(list(sys.argv[1:] if arguments is None else arguments))
    if not own:
        _make_parser().print_help()
        return 0
    options = _make_parser().parse_args(own)
    options.rest = passed_on
    try:
        options.run(options)
    except RpcError as error:
        print(f"rpcbench {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ChoiceError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split off the arguments for the program behind a subcommand."""
    # Before argparse, which would take options of that program for its own.
    if arguments[:1] == ["simulate"] and "--" in arguments:
        place = arguments.index("--")
        return arguments[:place], arguments[place + 1 :]
    passes_on = arguments[:1] in (["run"], ["launch"], ["lab"]) and arguments[1:2] not in (["-h"], ["--help"])
    return (arguments[:1], arguments[1:]) if passes_on else (arguments, [])


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rpcbench", description="A Jupyter workbench for distributed PyTorch.")
    parser.add_argument("--version", action="version", version=f"rpcbench {rpcbench.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a two-stage pipeline on two workers, and show where the time went")
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write accuracy, seconds and idle share here")
    demo.add_argument("--epochs", type=_parse_positive, metavar="N", help="passes over the training data")
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

    state = commands.add_parser(
        "state", help="print what the members of a cluster on this machine do, and who waits for whom",
        epilog="Exit status: 0 with a state, 1 if there is none to read, 2 if the words choose no cluster, or several.",
    )  # fmt: skip
    state.add_argument(
        "name", nargs="?", metavar="NAME",
        help="of one of several clusters: as an error lists them, as %%cluster start --name, or the number of the "
        "notebook's process; or HOST:25999 of a job that runs torch's debug server",
    )  # fmt: skip
    state.add_argument("--json", action="store_true", help="as JSON (docs/api/panel-json.md)")
    state.set_defaults(run=_state)

    _add_open(commands.add_parser("open", help="show traces of torch.profiler, dumps of its flight recorder, a record"))
    _add_simulate(commands.add_parser(
        "simulate", help="play a script as ranks that are not there: memory, collectives and time of a step",
        usage="rpcbench simulate [-m] script.py --mesh dp=16,tp=8 [options] [-- arguments of the script]",
        epilog="The script is one that torchrun starts. The step is the one between the second and the third return of "
        "optimizer.step(). In its arguments {dp} stands for the size of the dimension dp.",
    ))  # fmt: skip

    lessons = commands.add_parser("lessons", help="copy the lessons, with what they need, to a new folder")
    lessons.add_argument("folder", type=Path, nargs="?", help="the new folder (rpcbench-course)")
    lessons.set_defaults(run=_lessons)

    lab = commands.add_parser(
        "lab", help="open JupyterLab on a page of lessons",
        epilog="The lessons are those in ./notebooks, else those in ./rpcbench-course, which is made if there is none. "
        "Everything after `lab` is passed on to JupyterLab.",
    )  # fmt: skip
    lab.set_defaults(run=_lab)

    secret = commands.add_parser("secret", help="make the secret that workers on several hosts share")
    secret.add_argument("path", type=Path, metavar="PATH", help="the new file")
    secret.set_defaults(run=_secret)
    return parser


def _add_open(opening: argparse.ArgumentParser) -> None:
    opening.epilog = "Files of several ranks are shown together. A new notebook in this folder has the pictures."
    opening.add_argument("files", nargs="+", metavar="FILE", help="files, patterns or a folder")
    opening.add_argument("--text", action="store_true", help="print the summary; make no notebook")
    opening.set_defaults(run=_open)


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("script", help="a file, or with -m a module")
    simulate.add_argument("-m", dest="is_module", action="store_true", help="the script is a module")
    simulate.add_argument("--mesh", type=_parse_mesh, required=True, metavar="dp=16,tp=8", help="outermost first")
    simulate.add_argument("--hardware", default="h100", help="as rpcbench.hardware names it (h100)")
    simulate.add_argument("--tokens", type=_parse_positive, metavar="N", help="tokens of one step of the whole world")
    simulate.add_argument("--values", type=float, metavar="X", help="what each read of a tensor's value returns")
    simulate.add_argument("--save", type=Path, metavar="FILE", help="write the step here, for ui.perfetto.dev")
    simulate.add_argument("--layouts", action="store_true", help="compare all meshes of so many ranks")
    simulate.set_defaults(run=_simulate)


def _parse_mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in mesh:
            raise argparse.ArgumentTypeError(f"{text!r} is no mesh: give each dimension once, as dp=16,tp=8")
        mesh[name] = int(size)
    return mesh


def _parse_positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number from 1 up")
    return number


def _missing_packages(**packages: str) -> list[str]:
    """Return the packages, by pip's name, that are not installed here; the keywords are the names of their modules."""
    return [package for module, package in packages.items() if importlib.util.find_spec(module) is None]


def _note_absent_data() -> None:
    """Say on stderr which package some lessons need, unless it is installed."""
    if _missing_packages(sklearn="scikit-learn"):
        print("Lessons that train on digits need scikit-learn: pip install scikit-learn", file=sys.stderr)


def _demo(options: argparse.Namespace) -> None:
    if _missing_packages(sklearn="scikit-learn"):
        raise RpcError("scikit-learn, which has the data, is not installed here: pip install scikit-learn")
    from rpcbench.cli import demo

    demo.run_demo(json_file=options.json, epochs=options.epochs)


def _run(options: argparse.Namespace) -> None:
    """Run a script, or with -m a module, on this runtime; the processes that it starts are bound, too."""
    from rpcbench.torch_shim import extend_environment

    if not options.rest:
        raise RpcError("name a script, or a module with -m: rpcbench run script.py [arguments]")
    if options.rest[0] != "-m" and not Path(options.rest[0]).is_file():
        raise RpcError(f"there is no script {options.rest[0]}")
    sys.stdout.flush()  # exec discards Python's buffers
    os.execve(sys.executable, [sys.executable, *options.rest], extend_environment(os.environ))


def _launch(options: argparse.Namespace) -> None:
    """Run torchrun in this process."""
    from rpcbench.distributed import launch

    launch.launch(options.rest)


def _state(options: argparse.Namespace) -> None:
    """Print the state of a cluster or a job."""
    from rpcbench.cli import state_command

    state_command.print_state(options)


def _simulate(options: argparse.Namespace) -> None:
    """Simulate a script, and print the report."""
    from rpcbench.cli import simulate_command

    simulate_command.print_simulation(options)


def _open(options: argparse.Namespace) -> None:
    """Show the files of a job, as text or in JupyterLab."""
    if not options.text and _missing_packages(jupyterlab="jupyterlab"):
        raise RpcError("JupyterLab is not installed here: pip install jupyterlab, or add --text")
    from rpcbench.cli import open_command

    open_command.open_files(options)


def _lab(options: argparse.Namespace) -> None:
    """Open JupyterLab on the extension's start page, in the folder of the lessons, unless the arguments name a path."""
    from rpcbench.cli import lessons

    absent = _missing_packages(jupyterlab="jupyterlab", sklearn="scikit-learn")
    if "jupyterlab" in absent:
        raise RpcError(f"JupyterLab is not installed here: pip install {' '.join(absent)}")
    _note_absent_data()
    named = any(Path(argument).exists() for argument in options.rest)
    start = [] if named else [_START, str(lessons.lessons_folder())]
    sys.stdout.flush()  # exec discards Python's buffers
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *start, *options.rest])


def _lessons(options: argparse.Namespace) -> None:
    from rpcbench.cli import lessons

    folder = options.folder or lessons.DEFAULT
    lessons.copy_course(folder)
    print(f"The lessons are in {folder}/notebooks. To open them: cd {folder}; rpcbench lab")
    _note_absent_data()


def _secret(options: argparse.Namespace) -> None:
    from rpcbench.transport import run_dir

    path = options.path.expanduser().absolute()
    try:
        run_dir.make_secret(path)
    except OSError as error:
        raise RpcError(f"cannot make {path}: {error.strerror}") from error
    print(f"Made {path}. Copy it to every host, and set {run_dir.SECRET_VARIABLE}={path} for every worker.")
