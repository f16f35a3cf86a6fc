"""What screen readers are told of an element and all below it, by Chromium's accessibility tree."""

from __future__ import annotations

from typing import Any, NamedTuple

from playwright.sync_api import Page

CONTROLS = {"button", "link", "combobox", "textbox", "searchbox", "slider", "spinbutton", "checkbox", "tab", "listbox"}


class Told(NamedTuple):
    """One node: its role, what it is called, what is said besides, and whether the keyboard can reach it."""

    role: str
    name: str
    description: str
    focusable: bool


def told(page: Page, selector: str) -> list[Told]:
    """All nodes of the first element that the selector finds, in the order in which they are read."""
    session = page.context.new_cdp_session(page)
    try:
        document = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        found = session.send("DOM.querySelector", {"nodeId": document, "selector": selector})["nodeId"]
        top = session.send("DOM.describeNode", {"nodeId": found})["node"]["backendNodeId"]
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    finally:
        session.detach()
    by_id = {node["nodeId"]: node for node in nodes}
    (start,) = [node for node in nodes if node.get("backendDOMNodeId") == top]
    rows, left = [], [start]
    while left:
        node = left.pop()
        left += [by_id[child] for child in reversed(node.get("childIds", [])) if child in by_id]
        if not node["ignored"]:
            rows.append(_told(node))
    return rows


def _told(node: dict[str, Any]) -> Told:
    words = [str(node.get(part, {}).get("value", "")) for part in ("role", "name", "description")]
    is_focusable = any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", []))
    return Told(*words, is_focusable)
