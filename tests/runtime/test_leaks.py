"""The report of leaks: the RRefs that are still alive, their owners, and the lines that made them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from worlds import until, world

from rpcbench.rpc import RRef, remote, rpc_async, rpc_sync
from rpcbench.runtime import handles
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.checks import find_leaks

_kept: list[Any] = []


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made
    _kept.clear()


def keep(rref: RRef[Any]) -> None:
    _kept.append(rref)


def make_there() -> RRef[int]:
    return remote("worker2", int, (7,))


def line() -> int:
    """Return the line number of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_value_that_was_never_shared_is_no_leak(agents: list[Agent]) -> None:
    own = RRef([1])
    assert [find_leaks(agent) for agent in agents] == [[], [], []], "a value that was never shared is no leak"
    del own


def test_what_is_held_here_names_owner_type_and_line(agents: list[Agent]) -> None:
    held, made = remote("worker1", list, ((1, 2),)), line()
    held.to_here()
    (leak,) = find_leaks(agents[0])
    assert leak.held and (leak.rref, leak.forks) == (held._rref, (held._fork,))
    assert (leak.owner, leak.holders, leak.type) == ("worker1", ("notebook",), "list")
    assert leak.site.startswith(f"{__file__}:{made} in test_what_is_held")
    assert leak.site.endswith(': held, made = remote("worker1", list, ((1, 2),)), line()')
    del held
    until(lambda: find_leaks(agents[0]) == [])


def test_a_released_reference_is_not_held_even_before_the_owner_knows(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = remote("worker1", list, ((1, 2),))
    held.to_here()
    with monkeypatch.context() as patched:
        patched.setattr(agents[0], "released", SimpleQueue())  # the maintenance thread does not get the release yet
        held.release()
        assert find_leaks(agents[0]) == []
        assert [leak.forks for leak in find_leaks(agents[1])] == [(held._fork,)]
    del held
    until(lambda: find_leaks(agents[1]) == [])


def test_a_leak_at_the_owner_names_the_users_and_the_line_that_made_the_value(agents: list[Agent]) -> None:
    own, made = RRef({"a": 1}), line()
    for name in ("worker1", "worker2", "worker1"):
        rpc_sync(name, keep, (own,))
    (leak,) = find_leaks(agents[0])
    assert not leak.held and leak.owner == "notebook" and leak.type == "dict"
    assert sorted(leak.holders) == ["worker1", "worker1", "worker2"]
    assert leak.site.startswith(f"{__file__}:{made} in ")
    assert "owned by notebook, used by worker1, worker2, made at" in str(leak)
    (theirs,) = find_leaks(agents[2])
    assert theirs.held and theirs.owner == "notebook" and theirs.site == "", "it arrived as an argument"
    _kept.clear()
    until(lambda: find_leaks(agents[0]) == [])
    rref = own._rref
    until(lambda: agents[0].calls.values.creation_site_of(rref) is None)
    del own


def test_a_returned_rref_has_the_line_of_the_call_as_its_site(agents: list[Agent]) -> None:
    returned, made = rpc_sync("worker1", make_there), line()
    (leak,) = find_leaks(agents[0])
    assert leak.site.startswith(f"{__file__}:{made} in ")
    del returned


def test_an_rref_in_an_early_result_has_the_current_line_of_the_caller_as_its_site(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = agents[0].calls.send_request

    def send_and_dally(*args: Any) -> None:
        send(*args)
        until(lambda: find_leaks(agents[0]) != [])  # a thread of the pool has opened the reply

    monkeypatch.setattr(agents[0].calls, "send_request", send_and_dally)
    returned = rpc_sync("worker1", make_there)
    monkeypatch.undo()
    (leak,) = find_leaks(agents[0])
    assert leak.site != "", "it names the line of the caller at that moment: in `send`, or in the wait after it"
    del returned


def test_an_rref_in_a_result_that_the_pool_opens_has_the_line_of_the_call_as_its_site(agents: list[Agent]) -> None:
    future, made = rpc_async("worker1", make_there), line()
    until(lambda: find_leaks(agents[0]) != [])  # a thread of the pool has opened it, as no thread waits
    (leak,) = find_leaks(agents[0])
    assert leak.site.startswith(f"{__file__}:{made} in ")
    del future


def test_an_rref_that_a_remote_function_made_has_the_line_in_that_function_as_its_site(agents: list[Agent]) -> None:
    rpc_sync("worker1", keep_one_there)
    (leak,) = find_leaks(agents[1])
    assert " in keep_one_there: keep(remote(" in leak.site


def keep_one_there() -> None:
    keep(remote("worker2", int, (7,)))


def test_a_site_keeps_no_variables_alive() -> None:
    site = handles.creation_site()
    assert site is not None and site.code is test_a_site_keeps_no_variables_alive.__code__
    assert all(not inspect.isframe(part) for part in site)
    assert str(site).endswith("site = handles.creation_site()")


def test_a_site_in_ipython_names_the_cell() -> None:
    script = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("from rpcbench.runtime import handles", store_history=True)
shell.run_cell("x = 1\\nsite = handles.creation_site()", store_history=True)
print(shell.user_ns["site"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "Cell In[2], line 2: site = handles.creation_site()\n", done.stderr
