"""`rpcbench lessons`: copies the course, which the package brings along, to a folder of the reader's own.

The copy has `notebooks/`, with checks and pictures, and `docs/`, to which the lessons refer. A folder that exists is
left as it is, also one that another process makes meanwhile: the answers in it are the reader's. No process sees a part
of the copy.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import rpcbench
from rpcbench.base.errors import RpcError

DEFAULT = Path("rpcbench-course")
PARTS = {  # and what is not copied of them
    "notebooks": shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "progress.json"),
    "docs": shutil.ignore_patterns("pictures", "records", "site", "programs", "*.py", "*.png", "*.svg", "__pycache__"),
}
_HERE = Path(rpcbench.__file__).parent


def source() -> Path:
    """Return the folder that has the course: in an installed package its own, in a checkout the checkout."""
    packed = _HERE / "course"
    return packed if packed.is_dir() else _HERE.parent


def copy_course(target: Path) -> None:
    """Copy the course. RpcError if the folder exists, or cannot be made."""
    if target.exists():
        raise _refusal_error(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".rpcbench-lessons-") as place:
            made = Path(place, target.name)
            for part, left_out in PARTS.items():
                shutil.copytree(source() / part, made / part, ignore=left_out)
            _name_kernel(made / "notebooks")
            made.rename(target)  # fails where a folder with content is now
    except OSError as error:
        failed = RpcError(f"cannot copy the lessons to {target}: {error}")
        raise _refusal_error(target) if target.exists() else failed from error


def kernel_metadata() -> dict[str, Any]:
    """Return a notebook's metadata that name the kernel of this interpreter; none if Jupyter has no such kernel.

    Without them JupyterLab asks for a kernel, or writes its own into a notebook that it opens, which then has the mark
    of one that is not saved before its reader does anything."""
    try:
        from ipykernel.ipkernel import IPythonKernel  # here: an import of a moment, for this alone
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

        spec = KernelSpecManager().get_kernel_spec("python3")
    except (ImportError, NoSuchKernel):
        return {}
    kernel = {"display_name": spec.display_name, "language": spec.language, "name": "python3"}
    return {"kernelspec": kernel, "language_info": IPythonKernel.language_info}


def _name_kernel(folder: Path) -> None:
    """Write the kernel of this interpreter into the notebooks of a folder."""
    if metadata := kernel_metadata():
        for path in folder.glob("*.ipynb"):
            content = json.loads(path.read_text("utf-8"))
            content["metadata"] |= metadata
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _refusal_error(target: Path) -> RpcError:
    return RpcError(f"{target} exists, and your answers may be in it; name another folder, or remove it first")


def lessons_folder() -> Path:
    """Return the folder with lessons.json that `rpcbench lab` opens: ./notebooks, or that of a copy, made if needed."""
    if Path("notebooks/lessons.json").exists():
        return Path("notebooks")
    if not DEFAULT.exists():
        try:
            copy_course(DEFAULT)
        except RpcError:
            if not DEFAULT.exists():  # else another process has made it meanwhile
                raise
        print(f"The lessons are in ./{DEFAULT}.")
    return DEFAULT / "notebooks"
