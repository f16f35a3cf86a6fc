"""The command line of `python -m benchmarks`: its help is quick, and wrong usage is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_help_imports_nothing_heavy() -> None:
    script = """
import sys
from benchmarks.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    heavy = {"torch", "numpy", "rich", "IPython"} & set(sys.modules)
    sys.exit(f"loaded {heavy}" if heavy else end.code)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "--pipeline" in done.stdout


def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--rounds", "0"])
    assert "usage: python -m benchmarks" in capsys.readouterr().err


def test_an_error_with_advice_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no such row"]) == 1
    assert capsys.readouterr().err.startswith("benchmarks: no row has 'no such row' in its title; there are\n")
