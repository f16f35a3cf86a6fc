"""Clusters that files describe, for `%cluster start lab` and `Cluster.saved("lab")`.

The table `[tool.rpcbench.clusters.lab]` of the nearest pyproject.toml, in this directory or above, describes a cluster,
or `[clusters.lab]` in `rpcbench.toml` of the user's configuration directory (XDG_CONFIG_HOME, by default `~/.config`).
The project's file comes first.

Guarantees
- The keys are the words of `%cluster start` and the arguments of `Cluster`.
- A mistake is a ValueError of one sentence that names the file, before any worker starts.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rpcbench.base.errors import nearest

_TEXT, _NUMBER, _LIST, _TABLE = "a text", "a number", "a list", "a table"
_TYPES: dict[str, tuple[type, ...]] = {_TEXT: (str,), _NUMBER: (int, float), _LIST: (list,), _TABLE: (dict,)}
KEYS: dict[str, tuple[str, ...]] = {
    "workers": (_NUMBER,),
    "kind": (_TEXT,),
    "launcher": (_TEXT,),
    "hosts": (_TEXT, _LIST),
    "options": (_TABLE,),
    "gpus": (_TEXT, _LIST),
    "env": (_TABLE,),
    "name": (_TEXT,),
    "python": (_TEXT,),
    "grace": (_NUMBER,),
    "address": (_TEXT,),
}
"""The keys of a description, and what each may be."""
_USERS = "rpcbench.toml"
_WORKERS = 2  # where a description names no number, as in `Cluster`


class SavedCluster(NamedTuple):
    """The description of a cluster."""

    name: str  # of the running cluster
    arguments: dict[str, Any]  # of `Cluster`

    def changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `Cluster` with others in place of some. Variables and options are added to those of
        the file; another launcher or kind takes none of the file's options."""
        made = {**self.arguments}
        launcher = changes.get("launcher") or changes.get("kind")
        if launcher and launcher not in (made.get("launcher"), made.get("kind")):
            for of_the_other in ("launcher", "kind", "options", "address"):
                made.pop(of_the_other, None)
        for table in ("env", "options"):
            if both := {**(made.get(table) or {}), **(changes.get(table) or {})}:
                made[table] = both
        return {**made, **{name: value for name, value in changes.items() if name not in ("env", "options")}}


def find(name: str) -> SavedCluster:
    """Return the description of that name.

    Raises:
        ValueError: No file has it; a file is no TOML; it has an unknown key, or a value of a wrong type.
    """
    files = _files()
    for file, clusters in files.items():
        if name in clusters:
            return _read(name, clusters[name], file)
    there, where = names(), " and ".join(map(str, files)) or "none"
    if there:
        raise ValueError(f"no cluster {name!r} is saved: {nearest(name, there)}, in {where}")
    raise ValueError(
        f"no cluster {name!r} is saved: write [tool.rpcbench.clusters.{name}] with workers = 4 into pyproject.toml, or "
        f"[clusters.{name}] into {_users_file()}; files that were read: {where}"
    )


def names() -> list[str]:
    """Return the names of saved clusters. ValueError for a file that cannot be read."""
    return list(dict.fromkeys(name for clusters in _files().values() for name in clusters))


def _users_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", _USERS)


def _files() -> dict[Path, dict[str, Any]]:
    """Return the clusters of each file that exists, in the order in which they are asked."""
    here = Path.cwd()
    projects = [file for folder in (here, *here.parents) if (file := folder / "pyproject.toml").is_file()]
    found = {file: _clusters(file, ("tool", "rpcbench", "clusters")) for file in projects[:1]}
    if (users := _users_file()).is_file():
        found[users] = _clusters(users, ("clusters",))
    return found


def _clusters(file: Path, path: tuple[str, ...]) -> dict[str, Any]:
    try:
        table: Any = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:  # which names line and column
        raise ValueError(f"{file} cannot be read as TOML: {error}") from None
    for depth, key in enumerate(path):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ValueError(f"{file}: {'.'.join(path[: depth + 1])} has to be a table, [{'.'.join(path)}.lab]")
    return dict(table)


def _read(name: str, table: Any, file: Path) -> SavedCluster:
    place = f"{file}, cluster {name!r}"
    if not isinstance(table, dict):
        raise ValueError(f"{place}: it has to be a table, with keys such as workers")
    for key, value in table.items():
        if key not in KEYS:
            raise ValueError(f"{place}: there is no key {key!r}; {nearest(key, KEYS)}")
        if isinstance(value, bool) or not isinstance(value, tuple(kind for word in KEYS[key] for kind in _TYPES[word])):
            raise ValueError(f"{place}: {key} has to be {' or '.join(KEYS[key])}, not {value!r}")
    workers = table.get("workers", _WORKERS)
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"{place}: workers has to be a whole number of at least 1, not {workers!r}")
    return SavedCluster(table.get("name", name), _arguments(table, workers, file))


def _arguments(table: Mapping[str, Any], workers: int, file: Path) -> dict[str, Any]:
    """Return the arguments of `Cluster`. A path of an interpreter on this host is relative to the file's folder."""
    made = {key: value for key, value in table.items() if key not in ("workers", "name", "hosts")}
    if "hosts" in table:
        made["options"] = {**table.get("options", {}), "hosts": table["hosts"]}
    folder, _, _ = made.get("python", "").rpartition("/")
    if folder and made.get("launcher") != "command":
        made["python"] = str(file.parent / Path(made["python"]).expanduser())
    return {"n": workers, **made}
