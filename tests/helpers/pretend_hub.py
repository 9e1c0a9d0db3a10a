"""A hub on loopback, as far as the real libraries ask it: one data set, one tokenizer, and failures when told."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789" * 4
DATASET, TOKENIZER = "owner/texts", "owner/words"


class Hub:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.fails: list[int] = []
        """How the next requests for a part of what is trained on end: a status, or 0 for a connection that breaks."""
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str, wanted: str | None) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers for a request without its body; `wanted`: a range of bytes."""
        self.asked.append(path)
        path = path.partition("?")[0]
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for name, content in self.files.items()
            if name.endswith(".parquet")
        ]
        if "/resolve/" in path:
            return self._file(path.rpartition("/")[2], wanted)
        if re.fullmatch(rf"/api/datasets/{DATASET}/tree/{COMMIT}", path):
            return 200, json.dumps(files).encode(), {}
        if re.fullmatch(rf"/api/datasets/{DATASET}(/revision/\w+)?", path):
            names = [{"rfilename": name} for name in self.files]
            return 200, json.dumps({"id": DATASET, "sha": COMMIT, "siblings": names}).encode(), {}
        return 404, b"{}", {"X-Error-Code": "EntryNotFound"}

    def _file(self, name: str, wanted: str | None) -> tuple[int, bytes, dict[str, str]]:
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"1"'}
        content = self.files.get(name)
        if content is None:
            return 404, b"", {**headers, "X-Error-Code": "EntryNotFound"}
        if wanted is None:
            return 200, content, headers
        if self.fails and name.startswith("train"):
            return self.fails.pop(0), b"", headers
        first, last = (int(end) for end in wanted.removeprefix("bytes=").split("-"))
        return 206, content[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body, headers = hub.answer(self.path, self.headers.get("Range"))
            if status:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        do_GET = do_HEAD = do_POST = _do  # noqa: N815 (the library's names)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
