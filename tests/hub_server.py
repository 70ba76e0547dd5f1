"""A server on loopback that speaks as much of the Hub's protocol as its client asks for here."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAIN, TAGGED = "a" * 40, "b" * 40  # commits


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories, and notes what was asked for.

    Attributes:
        repositories: the folder of each name, by commit.
        closed: names to an error code of the Hub and a status.
        cut: bytes of a file after which the connection breaks, one for each answer to come.
        asked: method, path and range of each request, in order.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, dict[str, Path]] = {}
        self.closed: dict[str, tuple[str, int]] = {}
        self.cut: dict[str, list[int]] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that closes a connection is no error of the server."""

    def downloaded(self) -> list[str]:
        """Files whose content was asked for, headers of safetensors aside."""
        return [
            path.rpartition("/")[2]
            for method, path, span in self.asked
            if method == "GET" and "/resolve/" in path and span != "bytes=0-100000"
        ]

    def headers_read(self) -> list[str]:
        return [path.rpartition("/")[2] for _, path, span in self.asked if span == "bytes=0-100000"]


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        """Not on the terminal."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

    def answer(self, body: str = ""):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models" if api else "").strip("/").split("/")
        name, verb, commit = "/".join(parts[:2]), *(parts[2:4] or ["revision", "main"])
        if name in self.server.closed:
            return self.fail(*self.server.closed[name])
        if name not in self.server.repositories:
            return self.fail("RepoNotFound", 404)
        commit = {"main": MAIN, "v1": TAGGED}.get(commit, commit)
        if commit not in self.server.repositories[name]:
            return self.fail("RevisionNotFound", 404)
        folder = self.server.repositories[name][commit]
        files = sorted(file.name for file in folder.iterdir())
        if verb == "revision":
            return self.give_json({"id": name, "sha": commit, "siblings": []})
        if verb == "tree":
            return self.give_json([describe(folder / file) for file in files])
        if verb == "paths-info":
            asked = [file for file in files if file in unquote(body)]
            return self.give_json([describe(folder / file) for file in asked])
        if parts[-1] not in files:
            return self.fail("EntryNotFound", 404)
        return self.give_file(folder / parts[-1], commit)

    def fail(self, code: str, status: int):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def give_json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def give_file(self, file: Path, commit: str):
        data, first = file.read_bytes(), 0
        last = len(data) - 1
        if span := self.headers.get("Range"):
            start, _, end = span.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end or last), last)
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{oid(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if span:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        data = data[first : last + 1]
        cuts = self.server.cut.get(file.name)
        if cuts and span != "bytes=0-100000":
            data = data[: cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(data)


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def describe(file: Path) -> dict:
    data = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(data), "oid": oid(data)}
