"""A stand-in for W&B's server on this machine: it answers what a run asks for and keeps what was sent."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Sent:
    """Everything that arrived."""

    address: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Variables of each request that creates or updates a run."""
    history: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Headers, in small letters, and values of each line of history."""


@contextmanager
def wandb_server() -> Iterator[Sent]:
    sent = Sent()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path.endswith("/graphql"):
                self.reply({"data": self.graphql(json.loads(body))})
                return
            if self.path.endswith("/file_stream"):
                lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
                headers = {key.lower(): value for key, value in self.headers.items()}
                sent.history += [(headers, json.loads(line)) for line in lines]
            self.reply({})

        do_PUT = do_POST

        def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
            name = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
            given = request.get("variables") or {}
            if name and name[1] == "UpsertBucket":
                sent.runs.append(given)
                project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "team"}}
                run = {"id": "r", "name": given["name"], "displayName": given["name"], "project": project}
                return {"upsertBucket": {"bucket": {**run, "historyLineCount": 0}, "inserted": False}}
            if name and name[1] == "CreateRunFiles":
                files = [{"name": file, "uploadUrl": f"{sent.address}/upload"} for file in given["files"]]
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
            if name and name[1] == "Viewer":
                return {
                    "viewer": {
                        "id": "u",
                        "entity": "team",
                        "username": "u",
                        "flags": "{}",
                        "teams": {"edges": []},
                    }
                }
            return {}

        def reply(self, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sent.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield sent
    finally:
        server.shutdown()
        server.server_close()
