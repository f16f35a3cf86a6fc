"""The part of the package's metadata that depends on where its repository is; hatchling calls it at each build.

RPCBENCH_REPOSITORY is the only place that has the address, such as `https://host/owner/name`. With it, the package has
project URLs, and each relative link and picture of README.md leads to the file at the tag of this version. Without it
the package has no URLs, and README.md is its description as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"""(\]\(|^\[[^\]\n]+\]:\s+|\b(?:src|srcset|href)=["'])([^\s)"'>]+)""", re.MULTILINE)
NOT_RELATIVE = re.compile(r"#|//|[a-z][a-z0-9+.-]*:", re.IGNORECASE)
PICTURES = {".gif", ".jpg", ".png", ".svg", ".webp"}


class RepositoryMetadata(MetadataHookInterface):
    """Fill in the fields `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both fields in the project's table."""
        address = repository_address(os.environ)
        if not address:
            metadata.update(urls={}, readme="README.md")
            return
        tag = f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = project_urls(address, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": make_links_absolute(text, address, tag)}


def repository_address(environment: os._Environ[str] | dict[str, str]) -> str:
    """Return the address in an environment, without a slash at its end; an empty text where there is none."""
    address = environment.get("RPCBENCH_REPOSITORY", "").rstrip("/")
    if address and not re.fullmatch(r"https://[^/\s]+(/(?!blob/)[^/\s]+)+", address):
        raise ValueError(
            f"RPCBENCH_REPOSITORY is {address!r}, which is no web address of a repository: "
            "set it to one such as https://host/owner/name, or unset it"
        )
    return address


def project_urls(address: str, tag: str) -> dict[str, str]:
    """Return the addresses that the package index shows beside the description."""
    return {
        "Source": address,
        "Documentation": f"{address}/blob/{tag}/docs/README.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def make_links_absolute(text: str, address: str, tag: str) -> str:
    """Return a page in which each relative link and picture leads to the file at a tag; code stays as it is."""

    def lead(link: re.Match[str]) -> str:
        before, target = link.groups()
        if NOT_RELATIVE.match(target):
            return link[0]
        path = PurePosixPath(target.partition("#")[0])
        kind = "raw" if path.suffix in PICTURES else "blob"  # an index shows the bytes of a picture, not its page
        return f"{before}{address}/{kind}/{tag}/{target.removeprefix('./')}"

    parts = CODE.split(text)
    return "".join(part if place % 2 else ADDRESS.sub(lead, part) for place, part in enumerate(parts))
