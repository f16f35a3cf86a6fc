"""Clusters that files describe, for `%cluster start lab` and `Cluster.saved("lab")`.

The table `[clusters.lab]` in `rpcbench.toml` of the user's configuration directory (XDG_CONFIG_HOME, by default
`~/.config`) describes a cluster, or `[tool.rpcbench.clusters.lab]` of the nearest pyproject.toml, in this directory or
above. The user's file comes first.

Guarantees
- The keys are the words of `%cluster start` and the arguments of `Cluster`.
- A mistake is a ValueError of one sentence that names the file, before any worker starts.
- A description can run commands, so each file is one that no other user may write: it belongs to this user, and its
  folder to this user or root. A project's file is not above the repository, or the home, that this directory is in.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tomllib
from collections.abc import Iterator, Mapping
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
    "patience": (_NUMBER,),
    "address": (_TEXT,),
}
"""The keys of a description, and what each may be."""
_USERS, _PROJECTS = "rpcbench.toml", "pyproject.toml"
_WORKERS = 2  # where a description names no number, as in `Cluster`


class SavedCluster(NamedTuple):
    """The description of a cluster."""

    name: str  # of the running cluster
    arguments: dict[str, Any]  # of `Cluster`
    file: Path  # that has it

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
        ValueError: No file has it; a file is no TOML, or not this user's alone; it has an unknown key, or a value of a
            wrong type.
    """
    files: dict[Path, dict[str, Any]] = {}
    for file, clusters in _files():
        if name in clusters:
            return _read(name, clusters[name], file)
        files[file] = clusters
    there, where = _names(files), " and ".join(map(str, files)) or "none"
    if there:
        raise ValueError(f"no cluster {name!r} is saved: {nearest(name, there)}, in {where}")
    raise ValueError(
        f"no cluster {name!r} is saved: write [tool.rpcbench.clusters.{name}] with workers = 4 into pyproject.toml, or "
        f"[clusters.{name}] into {_users_file()}; files that were read: {where}"
    )


def names() -> list[str]:
    """Return the names of saved clusters. ValueError for a file that cannot be read."""
    return _names(dict(_files()))


def _names(files: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for clusters in files.values() for name in clusters))


def _files() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each file that exists, with its clusters, in the order in which they are asked."""
    if (users := _users_file()).is_file():
        yield users, _clusters(users, ("clusters",))
    if (project := _projects_file()) is not None:
        yield project, _clusters(project, ("tool", "rpcbench", "clusters"))


def _users_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", _USERS)


def _projects_file() -> Path | None:
    """Return the nearest pyproject.toml, here or above. ValueError if it is above the repository, or the home, that
    this folder is in."""
    folders = (here := Path.cwd(), *here.parents)
    file = next((file for folder in folders if (file := folder / _PROJECTS).is_file()), None)
    home = Path.home().resolve()
    edge = next((folder for folder in folders if folder == home or (folder / ".git").exists()), None)
    if file is not None and edge is not None and file.parent in edge.parents:
        what = "your home" if edge == home else "the repository"
        told = f"{file} is not read, as it is above {what} {edge}"
        raise ValueError(f"{told}: copy the tables that you trust to {_users_file()}, as [clusters.lab]")
    return file


def _text(file: Path) -> str:
    """Return the text of a file. ValueError if another user may have written it."""
    with file.open() as opened:
        wrong = _not_ours(file, os.fstat(opened.fileno()), os.geteuid())
        for folder in {file.parent, file.resolve().parent}:
            wrong = wrong or _not_ours(folder, folder.stat(), os.geteuid(), 0)  # root could write in any folder
        if wrong:
            told = f"{file} is not read, as its descriptions can run commands, and {wrong}"
            raise ValueError(f"{told}: make it yours alone (chown, chmod go-w), or copy what you trust to another file")
        return opened.read()


def _not_ours(path: Path, status: os.stat_result, *owners: int) -> str:
    """Return why users other than the owners may have written a file, or in a folder; empty if none may."""
    # As with git's safe.directory, root's files are not for others: root unpacks images and mounts disks, and the files
    # there are of anybody's making.
    if status.st_uid not in owners:
        return f"{path} belongs to user {_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        return f"other users may write {path} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # as in containers
        return str(uid)


def _is_private(gid: int) -> bool:
    """Return whether this user is alone in a group, as in the one that many systems make with each user."""
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    me = _user(os.geteuid())
    return group.gr_name == me and {*group.gr_mem} <= {me}


def _clusters(file: Path, path: tuple[str, ...]) -> dict[str, Any]:
    try:
        table: Any = tomllib.loads(_text(file))
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
    return SavedCluster(table.get("name", name), _arguments(table, workers, file), file)


def _arguments(table: Mapping[str, Any], workers: int, file: Path) -> dict[str, Any]:
    """Return the arguments of `Cluster`. A path of an interpreter on this host is relative to the file's folder."""
    made = {key: value for key, value in table.items() if key not in ("workers", "name", "hosts")}
    if "hosts" in table:
        made["options"] = {**table.get("options", {}), "hosts": table["hosts"]}
    folder, _, _ = made.get("python", "").rpartition("/")
    if folder and made.get("launcher") != "command":
        made["python"] = str(file.parent / Path(made["python"]).expanduser())
    return {"n": workers, **made}
