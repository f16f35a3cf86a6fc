"""What runs in a worker process: serve calls on pool threads and cells on the main thread, until the world ends."""

from __future__ import annotations

import threading

from rpcbench.launch.cells import CellRunner
from rpcbench.rpc.start import start_agent
from rpcbench.words.config import WorldConfig


def main(config: WorldConfig) -> None:
    """Join the world and work in it; returns when it ends or this worker is asked to leave."""
    agent = start_agent(config)
    runner = CellRunner(agent)
    agent.on_notice(LEAVE, lambda source, _: agent.closing.set())
    threading.Thread(target=lambda: (agent.closing.wait(), runner.stop()), name="rpcbench-end", daemon=True).start()
    runner.serve()
    agent.shutdown(graceful=False)


LEAVE = "leave"
