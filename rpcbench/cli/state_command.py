"""`rpcbench state`: prints what the members of a cluster on this machine do, or the ranks of a job with a debug server.

Guarantees
- Clusters are found by their run directories: those of this user alone, whatever directory the environment names.
- The cluster's own process makes the answer, so this command loads no torch and is of use beside another version.
- Each failure is one sentence. Its exit status is 1 where there is no state to read, and 2 where the words of the
  command choose no cluster, or several.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rpcbench.base.errors import (
    ChoiceError,
    NotConnectedError,
    RpcError,
    RpcTimeoutError,
    count_noun,
    suggest_nearest,
)
from rpcbench.transport import run_dir
from rpcbench.transport.question_socket import ask_question, find_askable
from rpcbench.transport.run_dir import PREFIX

_NAME_SECONDS = 3.0  # for a process to say which cluster it has
_STATE_SECONDS = 60.0  # each worker that lets no thread run is asked by a signal, for up to 5 s


def print_state(options: argparse.Namespace) -> None:
    """Print the state of the cluster or the job that the options name. ChoiceError; RpcError if it cannot be read."""
    name: str = options.name or ""
    if ":" in name:
        answer = _read_job(name, options.json)
    else:
        answer = ask_question(_choose_cluster(name), "json" if options.json else "text", _STATE_SECONDS)
    print(json.dumps(answer, indent=1, ensure_ascii=False) if options.json else answer)


def _read_job(address: str, as_json: bool) -> Any:
    from rpcbench.telemetry import cluster_state  # here: it loads torch
    from rpcbench.telemetry.attached_job import attach

    try:
        state = cluster_state.read_job_state(attach(address))
    except ValueError as error:
        raise ChoiceError(str(error)) from None
    except (ConnectionError, TimeoutError) as error:
        raise RpcError(str(error)) from None
    return state if as_json else cluster_state.state_text(state)


def _choose_cluster(name: str) -> Path:
    """Return the run directory of the cluster of this name, or of the only one."""
    directories = find_askable()
    if found := [path for path in directories if name and name in (path.name, path.name.removeprefix(PREFIX))]:
        return found[0]
    known = [(path, about) for path in directories if (about := _describe(path))]
    if not name and len(known) == 1:
        return known[0][0]
    if not known:
        raise _absence_error(name)
    meant = [path for path, about in known if name and name in (about["label"], str(about["process"]))]
    if len(meant) == 1:
        return meant[0]
    lines = "\n".join(f"  {_words(path, about)}" for path, about in known)
    if name and not meant:
        labels = [word for path, about in known for word in (path.name, about["label"]) if word]
        raise ChoiceError(f"no cluster is called {name}: {suggest_nearest(name, labels)}\n{lines}")
    count = count_noun(len(meant or known), "cluster")
    raise ChoiceError(f"{count} of yours run here{f' as {name}' if name else ''}: name one by its first word\n{lines}")


def _describe(path: Path) -> dict[str, Any] | None:
    """Return what the process says of its cluster; None if it has ended."""
    try:
        found: dict[str, Any] = ask_question(path, "name", _NAME_SECONDS)
    except NotConnectedError:
        return None
    except RpcTimeoutError:  # it is there, and may answer the next time
        return {"label": "", "process": "", "program": "a process that does not answer", "workers": []}
    return found


def _words(path: Path, about: dict[str, Any]) -> str:
    process = f", process {about['process']}" if about["process"] else ""
    workers = f", {count_noun(len(about['workers']), 'worker')}" if about["process"] else ""
    label = f" ({about['label']})" if about["label"] else ""
    return f"{path.name}{label}: {about['program']}{process}{workers}"


def _absence_error(name: str) -> RpcError:
    bases = run_dir.possible_bases()
    for path in [base / full for base in bases for full in (name, f"{PREFIX}{name}") if name]:
        if path.is_dir() and path.stat().st_uid != os.geteuid():
            return RpcError(f"{path.name} belongs to user {path.stat().st_uid}, and only that user may read its state")
    if name.removeprefix(PREFIX) != name:
        return RpcError(f"{name} is gone: no process of yours has it any more, and no other cluster of yours runs here")
    where = ", ".join(map(str, bases))
    return RpcError(
        f"no cluster of yours runs on this machine (none has a run directory in {where}). Of a job that runs torch's "
        "debug server: rpcbench state HOST:25999"
    )
