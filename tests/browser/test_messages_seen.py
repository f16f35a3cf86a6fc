"""Messages as a user of JupyterLab sees them: live while a cell runs, of one cell, as a still picture, and replayed."""

from __future__ import annotations

import pytest
from lab import settles, unlike

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

CELLS = [
    "%load_ext rpcbench\n%cluster start 2",
    "%panel messages",
    "import threading\nfrom rpcbench import rpc\ngo = threading.Event()\n"
    "def steps():\n    rpc.rpc_sync('worker1', abs, (-1,))\n    return rpc.rpc_sync('worker2', int)",
    "steps()\nwhile not live.state['view']['messages']: pass\nprint('called')",
    "%%trace\n%%remote worker1\nfrom rpcbench import rpc\nrpc.rpc_sync('worker2', abs, (-2,))",
    "traced = _\ntraced.snapshot()",
    "%record lesson.json",
    "_ = rpc.rpc_sync('worker2', len, ('four',))",
    "%record stop",
    "%cluster stop",
    "import rpcbench\nplayed = rpcbench.replay('lesson.json', 'messages')\nplayed",
]
SHOWN = """root => [...root.querySelectorAll('[data-message]')].map(
  one => [one.dataset.message, one.dataset.state, one.querySelector('title').textContent.split(',')[0]])"""


def drawn(output):
    """(key, state, first words) of the messages that a panel draws."""
    return output.locator(".rb-messages").evaluate(SHOWN)


def on_to_the_end(page, player, frame, last):
    """By the button; each click is awaited, as the other player would else be elsewhere. `frame()`: where it is."""
    for number in range(1, last + 1):
        player.get_by_role("button", name="Step", exact=True).click()
        settles(page, frame, number)


@pytest.mark.long
def test_messages_are_seen_live_and_of_one_cell_and_kept(show):
    notebook = show(CELLS, "messages.ipynb")
    notebook.run_to_end("%cluster start", "%panel", "def steps")
    live = notebook.output("%panel")
    live.locator(".rb-hint code").wait_for()
    panels = "[one for one in __import__('ipywidgets').Widget.widgets.values() if 'Messages' in type(one).__name__]"
    assert notebook.value("len(found)", after=f"found = {panels}\nlive = found[0]") == 1
    notebook.run_to_end("steps()\nwhile")
    called = [["received", words] for words in ("call abs", "result of abs", "call int", "result of int")]
    settles(notebook.page, lambda: [row[1:] for row in drawn(live)], called)

    notebook.run_to_end("%%trace")
    traced = notebook.cell("%%trace")
    traced.locator("[data-message]", has_text="result of abs").wait_for()
    words = ["run this cell", "call abs", "result of abs", "result of this cell"]
    settles(notebook.page, lambda: [row[2] for row in drawn(traced)], words)

    notebook.run_to_end(".snapshot()")
    still = notebook.output(".snapshot()").locator("img")
    still.wait_for()
    assert still.evaluate("one => one.decode().then(() => one.naturalWidth)") >= 800
    assert "4 messages, " in still.get_attribute("alt")

    notebook.run_to_end("%record lesson", "'four'", "%record stop", "%cluster stop", "rpcbench.replay")
    player = notebook.cell("rpcbench.replay")
    player.locator(".rb-messages .rb-stat").first.wait_for()
    last = notebook.value("len(played.player.record.frames) - 1")
    at = player.locator(".widget-readout")
    settles(notebook.page, lambda: int(at.inner_text()), last)
    notebook.value("played.player.at", after="played.go(0)")
    settles(notebook.page, lambda: int(at.inner_text()), 0)
    on_to_the_end(notebook.page, player, lambda: int(at.inner_text()), last)

    player.get_by_text("The record, played without a kernel").click()
    alone = player.frame_locator("iframe")
    at_alone = alone.locator("input[type=range]")
    settles(notebook.page, lambda: int(at_alone.input_value()), last)
    at_alone.fill("0")
    on_to_the_end(notebook.page, alone, lambda: int(at_alone.input_value()), last)
    for each in (player, alone):
        each.locator("[data-message][data-state='received']", has_text="result of len").wait_for()
    settles(notebook.page, lambda: unlike(alone.locator(".rb-messages").evaluate(SHOWN), drawn(player)), None)
    assert ["received", "call len"] in [row[1:] for row in drawn(player)]
    assert notebook.errors() == []
