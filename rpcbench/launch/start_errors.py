"""The errors of a start: which workers are missing, where each was to run, by which command, and the last output of it.

Guarantees
- An error names only workers that did not come, each with its host and its command, as far as its launcher knows them.
- It quotes the last lines of each log, also of a command that still runs: a queue or a login may wait there.
- A command that starts a worker is not taken for the worker's process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rpcbench.base.errors import RpcError
from rpcbench.launch.base import Handle, exit_status_text

_LINES = 6  # of each log, in the error of a timeout
_LONGER = "To wait longer: Cluster(2, patience=300), in a notebook %cluster start 2 --patience 300."
_OVERLAP = "srun waits, and may write nothing, while another step of its job uses the node; srun --overlap shares it."
_NOT_INSTALLED = ("No module named rpcbench", "No module named 'rpcbench'")
_INSTALL = "Install rpcbench there, or name an interpreter that has it: python=PATH."


def early_end_error(handle: Handle, status: int) -> RpcError:
    """Return the error of a worker that ended before it served."""
    command, words = start_command(handle), handle.last_words()
    subject = f"the command that starts {worker_place(handle)}" if command else worker_place(handle)
    lines = [f"{subject} ended ({exit_status_text(status)}) before {handle.name if command else 'it'} could serve"]
    lines[0] += f":\n{words}" if words else ", and wrote no output"
    lines += [f"The command: {command}"] if command else []
    lines += [_INSTALL] if any(sign in words for sign in _NOT_INSTALLED) else []
    return RpcError("\n".join(lines))


def late_start_error(missing: Sequence[Handle], joined_names: Sequence[str], seconds: float, address: str) -> RpcError:
    """Return the error of workers that did not join in time. `address`: where those on other hosts dial the notebook;
    empty if all are here."""
    names = ", ".join(handle.name for handle in missing)
    others = f" ({', '.join(joined_names)} joined)" if joined_names else ""
    first = f"timed out after {seconds:g} s waiting for {names} to join{others}"
    states = [_describe_state(handle, address) for handle in missing]
    advice = [_OVERLAP] if any(_is_exclusive_step(start_command(handle)) for handle in missing) else []
    return RpcError("\n".join([first, *states, *advice, _LONGER]))


def _is_exclusive_step(command: str) -> bool:
    """Return whether a command is a step of this process's allocation that shares no node with others."""
    words = command.split()
    return words[:1] == ["srun"] and "--overlap" not in words and "SLURM_JOB_ID" in os.environ


def _describe_state(handle: Handle, address: str) -> str:
    """Describe a worker that has not joined yet."""
    command, words = start_command(handle), handle.last_words().splitlines()[-_LINES:]
    dials = f", which dials the notebook at {address}" if address else ""
    runs = f"its command still runs, {command}" if command else f"its process {handle.pid} still runs"
    lines = [f"{worker_place(handle)}{dials}: {runs}; {'its last output:' if words else 'it has written nothing'}"]
    return "\n  ".join([*lines, *words])


def worker_place(handle: Handle) -> str:
    """Return the name of a worker, and its host if its launcher has chosen one."""
    host = getattr(handle, "host", "")
    return f"{handle.name} on {host}" if host else handle.name


def start_command(handle: Handle) -> str:
    """Return the command that starts a worker; empty if its launcher uses none."""
    return str(getattr(handle, "command", ""))
