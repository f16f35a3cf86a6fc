"""Find tests that fail by chance: `python tests/flaky.py [--times N] [pytest's arguments]` runs them repeatedly.

Meanwhile a loop keeps one core busy, as another program of the user would. Exit status 1 if any test has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core of this machine busy, the last one that this process may use."""
    core = max(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}:\n    sum(range(10_000))"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def failures(arguments: list[str]) -> list[str]:
    """Run pytest once; return the tests that failed, and the run itself if it ended in another way."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments], cwd=ROOT)
        told = Path(cache, "v", "cache", "lastfailed")
        failed = list(json.loads(told.read_text())) if told.exists() else []
    return failed if done.returncode in (0, 1) else [*failed, f"pytest, with status {done.returncode}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--times", type=int, default=5)
    options, arguments = parser.parse_known_args()
    with busy_core():
        failed = Counter(name for _ in range(options.times) for name in failures(arguments or ["-n", "auto"]))
    print(f"\n{len(failed)} tests failed in {options.times} runs beside a busy loop")
    for name, times in failed.most_common():
        print(f"{times:4}  {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
