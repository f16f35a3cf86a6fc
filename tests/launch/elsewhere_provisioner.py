"""A kernel provisioner other than that of jupyter_client; its kernels run on this host, too."""

from __future__ import annotations

import asyncio
import subprocess
from importlib.metadata import EntryPoint

from jupyter_client.provisioning import KernelProvisionerBase

ENTRY_POINT = EntryPoint("elsewhere", f"{__name__}:Elsewhere", "jupyter_client.kernel_provisioners")
LAUNCHED = []


class Elsewhere(KernelProvisionerBase):
    process = None

    @property
    def has_process(self):
        return self.process is not None

    async def pre_launch(self, **kwargs):
        self.parent.write_connection_file()
        cmd = self.parent.format_kernel_cmd(kwargs.pop("extra_arguments", []))
        return await super().pre_launch(cmd=cmd, **kwargs)

    async def launch_kernel(self, cmd, **kwargs):
        self.process = subprocess.Popen(cmd, start_new_session=True, stdin=subprocess.DEVNULL, **kwargs)
        LAUNCHED.append(self.process.pid)
        return self.parent.get_connection_info()

    async def poll(self):
        return self.process.poll() if self.process else 0

    async def wait(self):
        while (status := self.process.poll()) is None:
            await asyncio.sleep(0.05)
        self.process = None
        return status

    async def send_signal(self, signum):
        self.process.send_signal(signum)

    async def kill(self, restart=False):
        self.process.kill()

    async def terminate(self, restart=False):
        self.process.terminate()

    async def cleanup(self, restart=False):
        pass
