"""Which libraries are measured beside ours, and the table of what was seen: for people, and as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

from rich.table import Table

from rpcbench.base.errors import RpcError
from rpcbench.bench.peer_cells import OURS, PEERS, Peer

Found = Mapping[str, Mapping[str, str]]  # by library, by row
_NOTE = "seen once each, through a real kernel: rough figures, twice as much or half means nothing"


def chosen(names: Sequence[str]) -> list[Peer]:
    """Ours and those of these names, in any case, or all that are installed. RpcError where one is not there."""
    known = {name.lower(): peer for name, peer in PEERS.items()}
    for name in names:
        if name.lower() not in known:
            raise RpcError(f"no library {name!r} is known here; there are {', '.join(PEERS)}")
        if not known[name.lower()].is_installed:
            raise RpcError(missing(known[name.lower()]))
    wanted = [known[name.lower()] for name in names] or [peer for peer in PEERS.values() if peer.is_installed]
    return [peer for peer in PEERS.values() if peer is OURS or peer in wanted]


def missing(peer: Peer) -> str:
    """What is told instead of measuring it."""
    return f"{peer.name} is not installed here: pip install {peer.packages}"


def _rows(found: Found) -> list[tuple[str, ...]]:
    titles = next(iter(found.values()))
    return [(title, *(seen[title] for seen in found.values())) for title in titles]


def as_table(found: Found) -> Table:
    """One column for each library."""
    table = Table("", *found, title=_NOTE)
    for row in _rows(found):
        table.add_row(*row)
    return table


def as_markdown(found: Found) -> str:
    """The same with versions, and what it was measured on."""
    headings = ("", *(f"{name} {PEERS[name].version}" for name in found))
    body = [headings, ("---",) * len(headings), *_rows(found)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in body)
    load = os.getloadavg()[2]  # of fifteen minutes: the whole takes about ten
    machine = f"{os.cpu_count()} cores under a load of {load:.1f}, Python {platform.python_version()}"
    return f"{machine}; {_NOTE}.\n\n{table}\n"
