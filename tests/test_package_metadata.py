"""The metadata of the package: with the repository's address it has URLs and no relative link, without it neither."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from hatch_build import make_links_absolute, repository_address

ROOT = Path(__file__).parent.parent
ADDRESS = "https://forge.example/owner/name"


class Links(HTMLParser):
    """The addresses that a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.feed(MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text))

    def handle_starttag(self, tag, attrs):
        self.found += [(tag, value) for name, value in attrs if name in ("href", "src", "srcset")]


def build(folder: Path, **variables: str) -> Path:
    """Build the sdist, and the wheel from it alone, as a release does."""
    environment = {name: value for name, value in os.environ.items() if name != "RPCBENCH_REPOSITORY"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def metadata(folder: Path) -> list[Message]:
    """Return the metadata of the sdist and of the wheel in a folder."""
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2]: name for name in archive.getnames()}
        assert {"hatch_build.py", "README.md"} <= set(inside)
        texts = [archive.extractfile(inside["PKG-INFO"]).read()]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        texts.append(archive.read(name))
    return [email.message_from_string(text.decode()) for text in texts]


def test_with_an_address_the_description_has_no_relative_link(tmp_path):
    for told in metadata(build(tmp_path, RPCBENCH_REPOSITORY=f"{ADDRESS}/")):
        tag = f"v{told['Version']}"
        urls = dict(line.split(", ") for line in told.get_all("Project-URL"))
        assert urls["Source"] == ADDRESS and urls["Changelog"] == f"{ADDRESS}/blob/{tag}/CHANGELOG.md"
        found = Links(told.get_payload()).found
        assert ("img", f"{ADDRESS}/raw/{tag}/docs/panels.png") in found
        ours = {link for _, link in found if link.startswith(ADDRESS)}
        assert len(ours) > 10
        assert [link for _, link in found if not link.startswith(("https://", "#"))] == []
        paths = {link.partition(f"/{tag}/")[2].partition("#")[0] for link in ours | {*urls.values()} if tag in link}
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_without_an_address_the_description_is_the_readme(tmp_path):
    for told in metadata(build(tmp_path)):
        assert told.get_all("Project-URL") is None
        assert told.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_each_kind_of_link_is_led_to_the_tag_and_code_is_not():
    text = """
[![state](docs/a.svg)](docs/b.md#part) [here](#there) [web](https://example.org) ![](./c.png) `[x](y)`

[later]: docs/d.md

<source srcset="docs/e.png"><img src='docs/f.png'> <a href="LICENSE">
```python
f[0](x)
```
"""
    raw, blob = (f"{ADDRESS}/{kind}/v1/" for kind in ("raw", "blob"))
    expected = f"""
[![state]({raw}docs/a.svg)]({blob}docs/b.md#part) [here](#there) [web](https://example.org) ![]({raw}c.png) `[x](y)`

[later]: {blob}docs/d.md

<source srcset="{raw}docs/e.png"><img src='{raw}docs/f.png'> <a href="{blob}LICENSE">
```python
f[0](x)
```
"""
    assert make_links_absolute(text, ADDRESS, "v1") == expected


@pytest.mark.parametrize(
    "wrong", ["owner/name", "git@forge.example:owner/name", "https://forge.example", f"{ADDRESS}/blob/main"]
)
def test_an_address_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"RPCBENCH_REPOSITORY is .* set it to one such as"):
        repository_address({"RPCBENCH_REPOSITORY": wrong})
