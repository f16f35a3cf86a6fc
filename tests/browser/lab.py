"""JupyterLab in a headless Chromium: what a user has in front of them, for tests and for the pictures in the docs.

Rules
- Server, kernels and browser have folders of their own, made anew for each run: no settings of this machine's user.
- All waits await a condition. `SECONDS` bounds them: five times what they take on a busy machine.
- What a page must not do (an uncaught error, a request to another host) is kept in `Lab.wrong`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import addresses
import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

SECONDS = 150.0
ROOT = Path(__file__).parents[2]
LESSON = ROOT / "notebooks" / "00_pipeline_digits.ipynb"
EXTENSION = ROOT / "extension" / "labextension"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
PLACES = {"jupyterlab": "lab/tree/{}?reset&", "notebook": "notebooks/{}?"}
APPS = {"jupyterlab": "LabApp", "notebook": "JupyterNotebookApp"}
ITS_OWN = {("notebook", "Cannot read properties of undefined (reading 'schema')")}
"""Errors that a front end has when nothing of ours is there."""
SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}

# The kernel is connected and idle, and has been the same for a second: until then Lab may still replace it.
READY = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  const kernel = context?.isReady && context.session?.kernel;
  const idle = kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
  if (!idle || window.kernel_?.id !== kernel.id) window.kernel_ = idle ? {id: kernel.id, since: Date.now()} : null;
  return window.kernel_ !== null && Date.now() - window.kernel_.since > 1000;
}"""
COMMAND = """async ([index, command]) => {
  const { content } = window.jupyterapp.shell.currentWidget;
  content.activeCellIndex = index;
  content.deselectAll();
  window.jupyterapp.commands.execute(command);
}"""
EVALUATE = """async ([code, expression]) => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
  const ask = { code, store_history: false, user_expressions: { value: expression } };
  const reply = await kernel.requestExecute(ask).done;
  return reply.content.user_expressions.value;
}"""
ACTIVATE = """name => {
  const { shell } = window.jupyterapp;
  shell.activateById([...shell.widgets('main')].find(one => one.context?.path === name).id);
}"""
IS_OPEN = "name => [...(window.jupyterapp?.shell?.widgets?.('main') ?? [])].some(one => one.context?.path === name)"


def missing() -> str | None:
    """What is not installed here that a browser test needs, in words."""
    absent = [name for name in ("jupyterlab", "notebook", "playwright") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed: pip install -e '.[dev]'"
    if Path(sys.prefix, "share/jupyter/labextensions/rpcbench").exists():  # JupyterLab would load both
        return "the extension is here under its earlier name: pip uninstall rpcbench, then pip install --no-deps -e ."
    return None if CHROMIUM else "no Chromium: set CHROMIUM or put it on PATH"


class Lab:
    """A running JupyterLab, or another front end of `PLACES`, and a browser."""

    def __init__(self, folder: Path, address: str, token: str, browser: Browser, front: str = "jupyterlab") -> None:
        self.folder = folder
        self.front = front
        self.wrong: list[str] = []
        self.remembered = folder / ".home/settings/jupyter-rpcbench/layouts.jupyterlab-settings"
        self._address, self._token, self._browser = address, token, browser

    def leave(self) -> None:
        """Close all pages, and end all kernels; returns when they are gone."""
        for context in self._browser.contexts:
            context.close()
        for session in self.sessions().values():
            self._request("DELETE", f"sessions/{session}")

    def sessions(self) -> dict[str, str]:
        """The ids of the notebooks' sessions by path, each with a kernel that has started."""
        return {str(session["path"]): str(session["id"]) for session in json.loads(self._request("GET", "sessions"))}

    def _request(self, method: str, path: str) -> bytes:
        """The server's answer. Errors: urllib.error.HTTPError."""
        headers = {"Authorization": f"token {self._token}"}
        request = urllib.request.Request(f"{self._address}/api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return bytes(answer.read())

    def open(
        self,
        given: nbformat.NotebookNode | Iterable[str],
        name: str,
        width: int = 1400,
        height: int = 2400,
        scale: float = 1,
    ) -> Notebook:
        """A page with a copy of a notebook without its outputs, or with these cells, once its kernel can run cells."""
        if not isinstance(given, nbformat.NotebookNode):
            given = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in given])
        notebook = nbformat.from_dict(given)
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}  # that of this interpreter
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, self.folder / name)
        return Notebook(self._page(name, width, height, scale), name, [cell.source for cell in notebook.cells])

    def beside(self, notebook: Notebook) -> Notebook:
        """Another browser on the same notebook and kernel, with the outputs that stand there now."""
        notebook.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
        size = notebook.page.viewport_size
        assert size is not None
        return Notebook(self._page(notebook.name, size["width"], size["height"], 1), notebook.name, notebook.sources)

    def reopen(self, notebook: Notebook) -> Notebook:
        """The notebook as it was saved, in another browser, with no kernel at all."""
        page = self._page(notebook.name, 1400, 2400, 1)
        page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        page.locator(".jp-Toolbar-kernelName", has_text="No Kernel").wait_for()
        return Notebook(page, notebook.name, notebook.sources)

    def visit(
        self, place: str, width: int = 1440, height: int = 900, scale: float = 1, option: str | None = None
    ) -> Page:
        """A page at an address of the server, `place`, which ends with `?` or `&`; `option` is set in it.

        It is set as by the server of `rpcbench lab`: in the configuration within the page."""
        page = self._browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
        page.set_default_timeout(1e3 * SECONDS)
        page.on("pageerror", lambda error: self._failed(str(error)))
        page.on("request", lambda request: self._asked(request.url))
        page.on("websocket", lambda opened: self._asked(opened.url))
        if option is not None:
            mark = '"appName":'

            def fulfill(route: Route) -> None:
                answer = route.fetch()
                route.fulfill(response=answer, body=answer.text().replace(mark, f'"{option}": "yes", {mark}', 1))

            # A pattern is matched by the driver; for a function all requests would wait for this thread.
            page.route(re.compile("/lab/tree"), fulfill)
        page.goto(f"{self._address}/{place}token={self._token}", wait_until="domcontentloaded")
        return page

    def _page(self, name: str, width: int, height: int, scale: float) -> Page:
        page = self.visit(PLACES[self.front].format(name), width, height, scale)
        page.wait_for_function(READY, polling=100)
        return page

    def _failed(self, error: str) -> None:
        if (self.front, error) not in ITS_OWN:
            self.wrong.append(f"error in the page: {error}")

    def _asked(self, url: str) -> None:
        host = self._address.removeprefix("http")
        if not url.startswith((f"http{host}/", f"ws{host}/", "data:", "blob:")):
            self.wrong.append(f"request to {url}")


class Notebook:
    """An open notebook. Cells are named by a text that only their source contains."""

    def __init__(self, page: Page, name: str, sources: list[str]) -> None:
        self.page = page
        self.name = name
        self.sources = sources

    def index(self, text: str) -> int:
        (index,) = [i for i, source in enumerate(self.sources) if text in source]
        return index

    def cell(self, text: str) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(self.index(text))

    def output(self, text: str) -> Locator:
        return self.cell(text).locator(".jp-OutputArea-output")

    def activate(self) -> None:
        """Make it the current tab of the page, once it is open."""
        self.page.wait_for_function(IS_OPEN, arg=self.name)
        self.page.evaluate(ACTIVATE, self.name)

    def reload(self) -> None:
        """Reload the page; returns when the kernel can run cells."""
        self.page.reload(wait_until="domcontentloaded")
        self.activate()
        self.page.wait_for_function(READY, polling=100)

    def run(self, text: str) -> None:
        """Begin to run one cell."""
        self.page.evaluate(COMMAND, [self.index(text), "notebook:run-cell"])

    def run_above(self, text: str) -> None:
        """Begin to run all cells above this one."""
        self.page.evaluate(COMMAND, [self.index(text), "notebook:run-all-above"])

    def ended(self, text: str) -> None:
        """Wait for the end of a cell: its prompt has a number."""
        prompt = self.cell(text).locator(".jp-InputPrompt")
        self.page.wait_for_function("e => /\\d/.test(e.textContent)", arg=prompt.element_handle(), polling=50)

    def run_to_end(self, *texts: str) -> None:
        """Run these cells one after another, each to its end."""
        for text in texts:
            self.run(text)
            self.ended(text)

    def errors(self) -> list[str]:
        """Texts of all errors and warnings that cells show."""
        return self.page.locator(".jp-OutputArea-output[data-mime-type$='.stderr']").all_inner_texts()

    def value(self, expression: str, after: str = "") -> Any:
        """The value of an expression in the kernel, once it has run the cells before and the code `after`."""
        reply = self.page.evaluate(EVALUATE, [after, expression])
        assert reply["status"] == "ok", reply
        return ast.literal_eval(reply["data"]["text/plain"])


def settles(page: Page, read: Callable[[], Any], wanted: Any) -> None:
    """Wait until `read()` gives what is wanted: what is drawn comes a moment after what it is drawn of."""
    deadline = time.monotonic() + SECONDS
    while (found := read()) != wanted and time.monotonic() < deadline:
        page.wait_for_timeout(50)  # the page goes on
    assert found == wanted, f"it shows {found}"


def unlike(one: Any, other: Any) -> Any:
    """None where both are the same, for `settles`; else both, for its error to show."""
    return None if one == other else (one, other)


@contextlib.contextmanager
def running(folder: Path, dark: bool = False, front: str = "jupyterlab") -> Iterator[Lab]:
    """JupyterLab, or another front end, on notebooks in `folder`, and a browser; both end with the block."""
    from playwright.sync_api import sync_playwright

    token = secrets.token_hex(16)
    with _server(folder, token, dark, front) as address, sync_playwright() as driver:
        env: dict[str, str | float | bool] = {**os.environ, "XDG_RUNTIME_DIR": str(folder / ".home")}
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=env)
        try:
            yield Lab(folder, address, token, browser, front)
        finally:
            browser.close()


@contextlib.contextmanager
def _server(folder: Path, token: str, dark: bool, front: str) -> Iterator[str]:
    runtimes = tempfile.TemporaryDirectory(prefix="rpcbench-lab", ignore_cleanup_errors=True)  # kernels may be ending
    with addresses.port() as port, runtimes as runtime:
        yield from _server_at(port, Path(runtime), folder, token, dark, front)


def _server_at(port: int, runtime: Path, folder: Path, token: str, dark: bool, front: str) -> Iterator[str]:
    home = folder / ".home"
    _write_settings(home / "settings", dark)
    shutil.copytree(EXTENSION, home / "data" / "labextensions" / "jupyter-rpcbench")  # not the installed one
    own = {"CONFIG_DIR": "config", "DATA_DIR": "data"}
    env = {
        **os.environ,
        **{f"JUPYTER_{name}": str(home / part) for name, part in own.items()},
        "JUPYTER_RUNTIME_DIR": str(runtime),  # with a short path, as the paths of its kernels' sockets need it
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_PATH": "",
        "JUPYTER_PREFER_ENV_PATH": "0",  # else a virtual environment's own come first
        "JUPYTER_TOKEN": token,
    }
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    options += [f"--ServerApp.root_dir={folder}", f"--{APPS[front]}.expose_app_in_browser=True"]
    options += ["--KernelManager.transport=ipc"]
    log = home / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", front, *options], env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        _await_server(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(SECONDS)
        finally:
            server.kill()


def _write_settings(folder: Path, dark: bool) -> None:
    theme = {"apputils-extension/themes": {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"}}
    for name, values in (SETTINGS | theme).items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _await_server(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/login", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)  # nothing announces that a server listens
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
