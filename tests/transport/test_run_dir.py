"""Directories and secrets of one user: private, short and removed; a half-written secret is never read."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rpcbench.transport.run_dir import SOCKET_NAME, RunDirectory, shared_directory, shared_secret


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_run_directory_is_private_and_is_removed(runtime):
    one, other = RunDirectory(), RunDirectory()
    assert one.path.parent == other.path.parent == runtime
    assert one.path != other.path
    assert mode(one.path) == 0o700
    Path(one.path, "file").touch()
    one.remove_directory()
    one.remove_directory()
    assert not one.path.exists()
    path = other.path
    del other
    gc.collect()
    assert not path.exists()


def test_a_missing_run_directory_can_be_removed():
    directory = RunDirectory()
    directory.path.rmdir()
    directory.remove_directory()


def test_a_process_removes_its_run_directory_at_exit_and_a_forked_child_does_not(runtime):
    script = (
        "import os, sys\n"
        "from rpcbench.transport.run_dir import RunDirectory\n"
        "directory = RunDirectory()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "print(directory.path, directory.path.exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    path, existed = done.stdout.split()
    assert existed == "True"
    assert not Path(path).exists()


@pytest.mark.parametrize("make", [lambda: RunDirectory().path, lambda: shared_directory("a key")])
def test_a_run_directory_leaves_room_for_the_name_of_a_socket(runtime, monkeypatch, make):
    deep = Path(runtime, "d" * 60)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert make().parts[: len(runtime.parts)] == runtime.parts
    assert len(os.fsencode(make() / ("n" * SOCKET_NAME))) < 104


def test_the_error_without_a_writable_place_names_the_variable_to_set(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match="set XDG_RUNTIME_DIR"):
        RunDirectory()


def test_a_shared_directory_is_found_by_its_key(runtime):
    path = shared_directory("file:///tmp/x")
    assert path == shared_directory("file:///tmp/x") != shared_directory("file:///tmp/y")
    assert runtime in path.parents
    assert mode(path) == mode(path.parent) == 0o700


def test_a_directory_that_other_users_may_enter_is_refused():
    path = shared_directory("key")
    for wide in (path, path.parent):
        wide.chmod(0o710)
        with pytest.raises(PermissionError, match="chmod go-rwx"):
            shared_directory("key")
        wide.chmod(0o700)


def test_a_directory_of_another_user_is_refused(runtime, monkeypatch):
    mine = os.geteuid()
    Path(runtime, f"rpcbench-{mine + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {mine}"):
        shared_directory("key")


def test_a_link_in_place_of_the_directory_is_refused(runtime):
    elsewhere = Path(runtime, "elsewhere")
    elsewhere.mkdir(mode=0o700)
    Path(runtime, f"rpcbench-{os.geteuid()}").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is not a directory"):
        shared_directory("key")


def test_simultaneous_processes_read_one_secret():
    directory = shared_directory("key")
    with ThreadPoolExecutor(16) as pool:
        read = set(pool.map(lambda _: shared_secret(directory), range(200)))
    assert len(read) == 1
    assert len(read.pop()) == 32
    assert [entry.name for entry in directory.iterdir()] == ["secret"]
    assert mode(directory / "secret") == 0o600
    assert shared_secret(directory) != shared_secret(shared_directory("other"))


def test_a_secret_appears_complete_and_the_first_one_is_kept(monkeypatch):
    directory = shared_directory("key")
    link = os.link
    theirs = b"t" * 32

    def outrun(draft, path):
        assert Path(draft).stat().st_size == 32
        assert not Path(path).exists()
        Path(path).write_bytes(theirs)
        Path(path).chmod(0o600)
        link(draft, path)

    monkeypatch.setattr(os, "link", outrun)
    assert shared_secret(directory) == theirs


def test_an_invalid_secret_file_is_refused():
    path = shared_directory("key") / "secret"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="does not hold a secret"):
        shared_secret(path.parent)
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        shared_secret(path.parent)
