"""The arguments of `python -m benchmarks` reach the benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import command
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


def test_the_comparison_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(command, "run", lambda **options: asked.append(options))
    main(["--rounds", "3", "--seed", "7", "--json", "out.json", "--quick", "--only", "echo", "--only", "int"])
    files = command.Files(json=Path("out.json"))
    only = ["echo", "int"]
    assert asked == [{"against": "torch", "seed": 7, "quick": True, "rounds": 3, "only": only, "files": files}]


def test_a_seed_is_drawn_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: set[object] = set()
    monkeypatch.setattr(command, "run", lambda seed, **_: seeds.add(seed))
    main([])
    main([])
    assert len(seeds) == 2
