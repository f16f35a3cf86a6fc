"""Clusters that files describe, for `%cluster start lab` and `Cluster.saved("lab")`.

The table `[clusters.lab]` in `rpcbench.toml` of the user's configuration directory (XDG_CONFIG_HOME, by default
`~/.config`) describes a cluster, or `[tool.rpcbench.clusters.lab]` of the nearest pyproject.toml, in this directory or
above. The user's file comes first.

Guarantees
- The keys are the words of `%cluster start` and the arguments of `Cluster`.
- A mistake is a ValueError of one sentence that names the file, before any worker starts.
- A description can run commands, so it is used only from a file that no other user may write: the file belongs to this
  user, and its folder to this user or root. A project's file is not above the repository, or the home, that this
  directory is in. Any other file counts only in the error for a cluster that it describes.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rpcbench.base.errors import suggest_nearest

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

    def merge_arguments(self, changes: Mapping[str, Any]) -> dict[str, Any]:
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


class _File(NamedTuple):
    path: Path
    clusters: dict[str, Any]  # that it describes; none if it cannot be read, and is not trusted
    wrong: str  # why none of them is used; empty if the file is trusted


def find_cluster(name: str) -> SavedCluster:
    """Return the description of that name.

    Raises:
        ValueError: No file has it; the file that has it may be another user's work, or is above the repository or the
            home; a file of this user is no TOML; it has an unknown key, or a value of a wrong type.
    """
    files: list[_File] = []
    for file in _existing_files():
        if name in file.clusters:
            if file.wrong:
                raise ValueError(file.wrong)
            return _parse_cluster(name, file.clusters[name], file.path)
        files.append(file)
    there, where = _names_in_files(files), " and ".join(str(file.path) for file in files if not file.wrong) or "none"
    if there:
        raise ValueError(f"no cluster {name!r} is saved: {suggest_nearest(name, there)}, in {where}")
    raise ValueError(
        f"no cluster {name!r} is saved: write [tool.rpcbench.clusters.{name}] with workers = 4 into pyproject.toml, or "
        f"[clusters.{name}] into {_users_place()}; files that were read: {where}"
    )


def saved_cluster_names() -> list[str]:
    """Return the names of saved clusters that can be used. ValueError for a file of this user that is no TOML."""
    return _names_in_files(_existing_files())


def _names_in_files(files: Iterable[_File]) -> list[str]:
    return list(dict.fromkeys(name for file in files if not file.wrong for name in file.clusters))


def _existing_files() -> Iterator[_File]:
    """Yield each file that exists, in the order in which they are asked."""
    if (users := _users_file()) is not None and users.is_file():
        yield _read_file(users, ("clusters",))
    here = Path.cwd()
    project = next((file for folder in (here, *here.parents) if (file := folder / _PROJECTS).is_file()), None)
    if project is not None:
        yield _read_file(project, ("tool", "rpcbench", "clusters"), _is_above(project, here))


def _home_directory() -> Path | None:
    """Return the home of this user; None if there is none, as in containers with an arbitrary user."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def _users_file() -> Path | None:
    if configuration := os.environ.get("XDG_CONFIG_HOME"):
        return Path(configuration, _USERS)
    return None if (home := _home_directory()) is None else home / ".config" / _USERS


def _users_place() -> str:
    return str(_users_file() or f"{_USERS} in a directory that XDG_CONFIG_HOME names")


def _is_above(file: Path, here: Path) -> str:
    """Return why a project's file is not for this folder: it is above the repository, or the home, that the folder is
    in; empty if it is not above."""
    home = (found := _home_directory()) and found.resolve()
    edge = next((folder for folder in (here, *here.parents) if folder == home or (folder / ".git").exists()), None)
    if edge is None or file.parent not in edge.parents:
        return ""
    reason = f"{file} is not used, as it is above {'your home' if edge == home else 'the repository'} {edge}"
    return f"{reason}: copy the tables that you trust to {_users_place()}, as [clusters.lab]"


def _read_file(path: Path, keys: tuple[str, ...], wrong: str = "") -> _File:
    """Return a file with its clusters. `wrong` is why it is not trusted. ValueError if it is, and cannot be read."""
    try:
        with path.open("rb") as opened:
            wrong = wrong or _has_other_writers(path, os.fstat(opened.fileno()))
            return _File(path, _read_clusters(opened, path, keys), wrong)
    except (OSError, ValueError) as error:
        if wrong := wrong or _has_other_writers(path, path.stat()):  # also where this user may not open it
            return _File(path, {}, wrong)
        raise ValueError(str(error)) from None


def _has_other_writers(file: Path, status: os.stat_result) -> str:
    """Return why users other than this one may have written a file with that status; empty if none may."""
    wrong = _not_ours(file, status, os.geteuid())
    for folder in {file.parent, file.resolve().parent}:
        wrong = wrong or _not_ours(folder, folder.stat(), os.geteuid(), 0)  # root could write in any folder
    if not wrong:
        return ""
    reason = f"{file} is not used, as its descriptions can run commands, and {wrong}"
    return f"{reason}: make it yours alone (chown, chmod go-w), or copy what you trust to another file"


def _not_ours(path: Path, status: os.stat_result, *owners: int) -> str:
    """Return why users other than the owners may have written a file, or in a folder; empty if none may."""
    # As with git's safe.directory, root's files are not for others: root unpacks images and mounts disks, and the files
    # there are of anybody's making.
    if status.st_uid not in owners:
        return f"{path} belongs to user {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        return f"other users may write {path} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _user_name(uid: int) -> str:
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
    me = _user_name(os.geteuid())
    return group.gr_name == me and {*group.gr_mem} <= {me}


def _read_clusters(opened: BinaryIO, file: Path, path: tuple[str, ...]) -> dict[str, Any]:
    try:
        table: Any = tomllib.load(opened)
    except (OSError, ValueError, RecursionError) as error:  # which names line and column
        raise ValueError(f"{file} cannot be read as TOML: {error}") from None
    for depth, key in enumerate(path):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ValueError(f"{file}: {'.'.join(path[: depth + 1])} has to be a table, [{'.'.join(path)}.lab]")
    return dict(table)


def _parse_cluster(name: str, table: Any, file: Path) -> SavedCluster:
    place = f"{file}, cluster {name!r}"
    if not isinstance(table, dict):
        raise ValueError(f"{place}: it has to be a table, with keys such as workers")
    for key, value in table.items():
        if key not in KEYS:
            raise ValueError(f"{place}: there is no key {key!r}; {suggest_nearest(key, KEYS)}")
        if isinstance(value, bool) or not isinstance(value, tuple(kind for word in KEYS[key] for kind in _TYPES[word])):
            raise ValueError(f"{place}: {key} has to be {' or '.join(KEYS[key])}, not {value!r}")
    workers = table.get("workers", _WORKERS)
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"{place}: workers has to be a whole number of at least 1, not {workers!r}")
    return SavedCluster(table.get("name", name), _cluster_arguments(table, workers, file), file)


def _cluster_arguments(table: Mapping[str, Any], workers: int, file: Path) -> dict[str, Any]:
    """Return the arguments of `Cluster`. A path of an interpreter on this host is relative to the file's folder."""
    made = {key: value for key, value in table.items() if key not in ("workers", "name", "hosts")}
    if "hosts" in table:
        made["options"] = {**table.get("options", {}), "hosts": table["hosts"]}
    folder, _, _ = made.get("python", "").rpartition("/")
    if folder and made.get("launcher") != "command":
        made["python"] = str(file.parent / Path(made["python"]).expanduser())
    return {"n": workers, **made}
