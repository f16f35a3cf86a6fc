"""Bodies of torch's own tests of torch.distributed, run one at a time on workers: `run` on each of them at once.

torch's harness starts processes for each test. Here the workers stay: each body gets a world of its own, and ends it.
"""

from __future__ import annotations

import functools
import importlib
import os
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as c10d
from torch.testing._internal.common_utils import set_rng_seed

SECONDS = 30  # that a collective of a body waits
_MODULE = "torch.testing._internal.distributed.distributed_test"


@functools.cache
def bodies(scratch: str) -> tuple[Any, type[unittest.TestCase]]:
    """Load torch's tests. Returns their module, and a class with a method for each body. `scratch`: their folder."""
    os.environ.update(BACKEND="gloo", TEMP_DIR=scratch)  # read when the module is loaded
    for each in ("barrier", "test_dir", "init_dir"):
        Path(scratch, each).mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(_MODULE)
    return module, type("Bodies", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def names(scratch: str) -> list[str]:
    """Return the names of all bodies."""
    return list(unittest.TestLoader().getTestCaseNames(bodies(scratch)[1]))


def run(scratch: str, name: str, world: str) -> str:
    """Run a body in a world of torch's with the name `world`. Returns "pass", "skip", or the end of what went wrong."""
    module, kind = bodies(scratch)
    case: Any = kind(name)
    case.rank, case.file_name = int(os.environ["RANK"]), f"{scratch}/{world}.file"
    timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, SECONDS))
    store = c10d.FileStore(f"{scratch}/{world}.store", 3)
    c10d.init_process_group("gloo", store=store, rank=case.rank, world_size=3, timeout=timeout)
    try:
        c10d.barrier()
        set_rng_seed()
        getattr(case, name)()
        c10d.barrier()
    except (unittest.SkipTest, SystemExit):  # torch's decorators leave by a status
        return "skip"
    except Exception as error:
        return "".join(traceback.format_exception(error))[-2000:]
    finally:
        if c10d.is_initialized():
            c10d.destroy_process_group()
    return "pass"
