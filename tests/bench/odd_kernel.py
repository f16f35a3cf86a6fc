"""A kernel like those of JupyterLab extensions: it sends output by a comm, fails without a visible error, and loses
its first cell."""

from __future__ import annotations

import asyncio
import threading
import time

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

OUTPUTS = "odd.outputs"


class OddKernel(Kernel):
    implementation, implementation_version, banner = "odd", "0", ""
    language_info = {"name": "python", "mimetype": "text/x-python", "file_extension": ".py"}

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.shell_handlers["comm_open"] = self.comm_open
        self.comm = ""
        self.seen = 0
        self.stopped = threading.Event()

    async def comm_open(self, stream, ident, parent) -> None:
        if parent["content"]["target_name"] == OUTPUTS:
            self.comm = parent["content"]["comm_id"]

    async def interrupt_request(self, stream, ident, parent) -> None:
        self.stopped.set()
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    def show(self, text: str) -> None:
        self.send_response(self.iopub_socket, "comm_msg", {"comm_id": self.comm, "data": {"text": text}})

    async def do_execute(self, code, silent, store_history=True, user_expressions=None, allow_stdin=False):
        self.seen += 1
        if "torch" in code and self.seen > 1:
            self.show("tensor([1.])")
        if "range(3)" in code:
            self.show("".join(f"<line {number} {time.monotonic()}>\n" for number in range(3)))
        if "sleep" in code and "range" not in code:
            await asyncio.get_running_loop().run_in_executor(None, self.stopped.wait)
            return self.failure("Stopped")
        if "1 / 0" in code:
            return self.failure("OddError")
        return {"status": "ok", "execution_count": self.seen, "payload": [], "user_expressions": {}}

    def failure(self, name: str):
        return {"status": "error", "ename": name, "evalue": "", "traceback": [], "execution_count": self.seen}


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=OddKernel)
