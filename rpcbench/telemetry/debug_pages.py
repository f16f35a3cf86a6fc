"""Reads the pages of torch's debug server (`torch.distributed.debug.start_debug_server`), which has those of all ranks.

Guarantees
- Only rank 0's server is read, so one forwarded port is enough. Nothing is changed in the job.
- A port that is closed, speaks something else, or has pages of another form is a ConnectionError that says so.
- A rank that did not answer the server has an error in its place; the others' answers are kept.
- An answer is text or JSON, and data: nothing of it runs. One of more than `MOST_BYTES` is refused.
"""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

MOST_BYTES = 2_000_000_000
PORT = 25999  # torch's default
_SLACK_SECONDS = 15.0  # more than the server waits for a rank, 60 s by default
_TITLE = "Torch Distributed Debug Server"
_ANSWER = re.compile(
    r"<h2>Rank (\d+): (.*?)</h2>\s*(?:<p>Failed to fetch: status=(\d+)</p>\s*)?"
    r"(?:<pre>(.*?)</pre>|<script>\s*function run\d+\(\) \{\s*var data = (.*?);\s*openPerfetto\(data\);)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer of one rank to its debug server."""

    rank: int
    address: str  # of the rank's own server, `http://host:port`
    text: str
    error: str = ""  # why there is no text

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or self.address


@dataclass(frozen=True, slots=True)
class DebugServer:
    """The address of rank 0's debug server."""

    host: str
    port: int = PORT

    @staticmethod
    def at_address(address: str) -> DebugServer:
        """Return the server at `host:port`, `host`, or its URL. ValueError for other texts."""
        parts = urlsplit(address if "//" in address else f"//{address}")
        try:
            port = parts.port or PORT
        except ValueError:
            port = 0
        if not parts.hostname or not port or parts.scheme not in ("", "http") or parts.path.strip("/"):
            raise ValueError(f"{address!r} is no address of a debug server: write host:port, as node7:{PORT}")
        return DebugServer(parts.hostname, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def fetch_answers(self, path: str, seconds: float = 60.0) -> list[RankAnswer]:
        """Return the answers on a page, by rank. `seconds`: how long the server may take for its ranks.

        Raises:
            ConnectionError: Nothing answers there, or no debug server of torch, or one with other pages.
            TimeoutError: The server itself does not answer.
        """
        page = self._fetch_page(path, seconds + _SLACK_SECONDS)
        answers = [_read_answer(found) for found in _ANSWER.finditer(page)]
        if not answers:
            raise ConnectionError(f"the debug server at {self} has a page {path} of another form: its torch is another")
        return sorted(answers, key=lambda answer: answer.rank)

    def _fetch_page(self, path: str, seconds: float) -> str:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            data = response.read(MOST_BYTES + 1)
        except TimeoutError:
            raise TimeoutError(f"the debug server at {self} has not answered {path} within {seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(
                f"no debug server of torch answers at {self}: {error or type(error).__name__}. Each rank of the job "
                f"calls torch.distributed.debug.start_debug_server(port={self.port}); rank 0's host has the port."
            ) from None
        finally:
            connection.close()
        if len(data) > MOST_BYTES:
            raise ConnectionError(f"the answer of {self} to {path} has more than {MOST_BYTES / 1e9:g} GB")
        page = data.decode(errors="replace")
        if _TITLE not in page or response.status != http.client.OK:
            raise ConnectionError(_describe_refusal(self, path, response.status, page))
        return page


def _describe_refusal(server: DebugServer, path: str, status: int, page: str) -> str:
    if _TITLE in page or "distributed.debug" in page:
        return f"the debug server at {server} refuses {path}, with status {status}: {page[:300].strip()}"
    return f"{server} answers, but it is no debug server of torch (status {status}, {page[:60].strip()!r})"


def _read_answer(found: re.Match[str]) -> RankAnswer:
    rank, address, status, text, data = found.groups()
    base = address.partition("/handler/")[0]
    if status is not None:
        return RankAnswer(int(rank), base, "", f"{(text or '').strip()} (status {status})")
    return RankAnswer(int(rank), base, text if data is None else data)  # torch escapes neither
