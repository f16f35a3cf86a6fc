"""`rpcbench simulate`: plays a script as ranks of a world, and prints the report.

Guarantees
- A wrong argument is an error before a rank is played.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

from rpcbench.base.errors import RpcError, SimulationError
from rpcbench.launch.simulate_programs import describe_hardware
from rpcbench.launch.simulate_scripts import Script, plan_script, simulate_script


def print_simulation(options: argparse.Namespace) -> None:
    """Play the script that the options name, and print its step, or all layouts. RpcError if it cannot be played."""
    try:
        _check_arguments(options)
        hardware = describe_hardware(options.hardware)
        script = Script(options.script, hardware, options.rest, options.is_module, options.values)
        if options.layouts:
            ranks = math.prod(options.mesh.values())
            print(plan_script(script, ranks, [*options.mesh], options.tokens))
            return
        world = simulate_script(script, options.mesh, options.tokens)
    except (SimulationError, ValueError) as error:
        raise RpcError(str(error)) from error
    print(world)
    if options.save is not None:
        print(f"The step is in {world.save(options.save)}: open it at ui.perfetto.dev")


def _check_arguments(options: argparse.Namespace) -> None:
    if options.is_module:
        if importlib.util.find_spec(options.script) is None:
            raise RpcError(f"there is no module {options.script}")
    elif not Path(options.script).is_file():
        raise RpcError(f"there is no script {options.script}")
    if options.layouts and options.save is not None:
        raise RpcError("--save writes one step, and --layouts plays many: give one of them")
    if options.save is not None and not options.save.parent.is_dir():
        raise RpcError(f"there is no directory {options.save.parent} for {options.save.name}")
