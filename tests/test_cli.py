"""The command line: it starts fast, passes its options on, and names missing packages."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ipykernel.ipkernel import IPythonKernel

import rpcbench
from rpcbench.base.errors import WorkerLostError
from rpcbench.cli.main import main


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that this process would have executed, in an empty directory."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    monkeypatch.chdir(tmp_path)
    return commands


def test_the_place_of_the_lessons_is_told_though_stdout_is_a_pipe(tmp_path: Path) -> None:
    script = """
import os
os.execv = lambda *command: os._exit(0)  # as exec, it writes no buffer of Python
from rpcbench.cli.main import main
main(["lab"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.startswith("The lessons are in "), done.stderr


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in place of the training; `asked` lists the options of each run."""
    module = types.ModuleType("rpcbench.cli.demo")
    module.asked = []
    module.run_demo = lambda **options: module.asked.append(options)
    monkeypatch.setitem(sys.modules, "rpcbench.cli.demo", module)
    monkeypatch.setattr("rpcbench.cli.demo", module, raising=False)
    return module


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"]])
def test_help_and_version_import_no_heavy_package(arguments: list[str]) -> None:
    script = f"""
import sys
from rpcbench.cli.main import main
try:
    main({arguments!r})
except SystemExit as end:
    heavy = {{"torch", "numpy", "rich", "IPython"}} & set(sys.modules)
    sys.exit(f"loaded {{heavy}}" if heavy else end.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rpcbench" in done.stdout


def test_the_state_is_asked_for_without_torch(tmp_path: Path) -> None:
    script = """
import sys
from rpcbench.cli.main import main
main(["state", "no-such"])
print(*{"torch", "IPython"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("\n", 0) and done.stderr.startswith("rpcbench state: no cluster")


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"rpcbench {rpcbench.__version__}\n"


@pytest.mark.parametrize("arguments", [["no-such"], ["demo", "--no-such"], ["demo", "--epochs", "0"]])
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert "usage: rpcbench" in capsys.readouterr().err


def test_demo_gets_the_options_of_its_command(demo: types.ModuleType) -> None:
    assert main(["demo", "--json", "out.json", "--epochs", "3"]) == 0
    assert main(["demo"]) == 0
    assert demo.asked == [{"json_file": Path("out.json"), "epochs": 3}, {"json_file": None, "epochs": None}]


def test_an_error_of_rpcbench_is_printed_as_one_line(
    demo: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise WorkerLostError("worker1 was killed; start again")

    demo.run_demo = fail
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "rpcbench demo: worker1 was killed; start again\n"


def test_ctrl_c_exits_with_status_130_and_prints_no_error(
    demo: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(**_: object) -> None:
        raise KeyboardInterrupt

    demo.run_demo = stop
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_lab_opens_the_start_page(
    executed: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["lab"])
    main(["lab"])
    assert capsys.readouterr().out == "The lessons are in ./rpcbench-course.\n"  # made once
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "lessons.json").write_text("[]")
    main(["lab", "--port", "8899"])
    (tmp_path / "mine.ipynb").touch()
    main(["lab", "mine.ipynb"])
    jupyterlab = [sys.executable, "-m", "jupyterlab"]
    start = "--ServerApp.tornado_settings={'page_config_data': {'rpcbenchStart': 'yes'}}"
    assert executed == [
        *[[*jupyterlab, start, "rpcbench-course/notebooks"]] * 2,
        [*jupyterlab, start, "notebooks", "--port", "8899"],
        [*jupyterlab, "mine.ipynb"],
    ]


def test_lessons_copies_the_course_and_all_it_links_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine"
    assert main(["lessons", str(target)]) == 0
    assert f"cd {target}; rpcbench lab" in capsys.readouterr().out
    rows = json.loads((target / "notebooks" / "lessons.json").read_text())
    for row in rows:
        path = target / "notebooks" / f"{row['lesson']}.ipynb"
        linked = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", path.read_text())
        for link in [each for each in linked if not each.startswith("http")]:
            assert (path.parent / link).exists(), f"{path.name}: {link}"
        assert (target / "notebooks" / "pictures" / f"{row['lesson']}.svg").exists()
        metadata = json.loads(path.read_text())["metadata"]  # as JupyterLab would write it, and call the lesson unsaved
        assert metadata["kernelspec"]["display_name"] == "Python 3 (ipykernel)"
        assert metadata["language_info"] == IPythonKernel.language_info
    answer = target / "notebooks" / "mine.txt"
    answer.write_text("my answer")
    assert main(["lessons", str(target)]) == 1
    assert "your answers may be in it; name another folder" in capsys.readouterr().err
    assert answer.read_text() == "my answer"


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr("rpcbench.cli.lessons.source", lambda: tmp_path)  # it has no docs
    assert main(["lessons", str(tmp_path / "mine")]) == 1
    assert not (tmp_path / "mine").exists()


def test_a_folder_that_another_process_makes_during_the_copy_is_left(
    executed: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copytree, answer = shutil.copytree, tmp_path / "rpcbench-course" / "notebooks" / "mine.txt"

    def race(*of: Any, **how: Any) -> None:
        copytree(*of, **how)
        assert answer.exists() or not answer.parents[1].exists(), "no part of a copy is seen"
        answer.parent.mkdir(parents=True, exist_ok=True)
        answer.write_text("my answer")

    monkeypatch.setattr(shutil, "copytree", race)
    assert main(["lessons"]) == 1
    assert "rpcbench-course exists, and your answers may be in it" in capsys.readouterr().err
    assert answer.read_text() == "my answer" and [*tmp_path.iterdir()] == [answer.parents[1]]
    shutil.rmtree(answer.parents[1])
    main(["lab"])  # which opens what the other one has made
    assert executed[0][-1] == "rpcbench-course/notebooks" and answer.read_text() == "my answer"


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "copy the lessons, with what they need" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "-m", "rpcbench"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("usage: rpcbench "), done.stderr


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that can be imported, as far as the command can see."""
    found: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    return found


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    installed: set[str], executed: list[list[str]], demo: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab"]) == 1
    assert capsys.readouterr().err.endswith("not installed here: pip install jupyterlab scikit-learn\n")
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.endswith("not installed here: pip install scikit-learn\n")
    installed.add("sklearn")
    assert main(["lab"]) == 1
    assert capsys.readouterr().err == "rpcbench lab: JupyterLab is not installed here: pip install jupyterlab\n"
    assert executed == [] and demo.asked == []
    assert main(["demo"]) == 0 and demo.asked


def test_lessons_open_without_their_data_with_a_note(
    installed: set[str], executed: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.add("jupyterlab")
    assert main(["lab"]) == main(["lessons", "mine"]) == 0 and len(executed) == 1
    note = "Lessons that train on digits need scikit-learn: pip install scikit-learn\n"
    assert capsys.readouterr().err == note * 2
    installed.add("sklearn")
    main(["lab"])
    assert capsys.readouterr().err == ""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that installs the metadata of a distribution `rpcbench` with that command, first on the path."""

    def installs(command: str) -> None:
        metadata = tmp_path / "path" / "rpcbench-0.6.1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: rpcbench\nVersion: 0.6.1\n")
        (metadata / "entry_points.txt").write_text(f"[console_scripts]\nrpcbench = {command}\n")
        monkeypatch.syspath_prepend(tmp_path / "path")

    return installs


REMEDY = "Remove both with `pip uninstall rpcbench jupyter-rpcbench`, then install `jupyter-rpcbench` again.\n"


def test_the_command_and_the_extension_tell_of_the_other_distribution_of_the_name(
    install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rpcbench.notebook.magics.register", lambda _: None)
    install("rpcbench.cli:main")
    assert main([]) == 0
    assert capsys.readouterr().err.endswith(REMEDY)
    rpcbench.load_ipython_extension(types.SimpleNamespace(user_ns={}))  # type: ignore[arg-type]
    assert capsys.readouterr().err.endswith(REMEDY)


def test_this_package_under_its_earlier_name_is_no_other_distribution(
    install: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install("rpcbench.cli.main:main")
    assert main([]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_of_the_other_distribution_tells_of_it_where_its_files_were_overwritten(tmp_path: Path) -> None:
    """As its command and its `__main__.py` do; where it was installed last, `__init__.py` is also its own."""
    (tmp_path / "rpcbench").mkdir()
    (tmp_path / "rpcbench" / "__init__.py").write_text('__version__ = "0.6.1"\n')
    (tmp_path / "rpcbench" / "cli").symlink_to(Path(rpcbench.__file__).parent / "cli")
    script = "import sys; from rpcbench.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.endswith(REMEDY), done.stderr
