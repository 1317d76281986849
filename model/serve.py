"""Run the HTTP API until it is told to end: `python -m model serve`.

It listens on this machine alone, unless it is given another address and, in the environment, a key to ask for.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import os
import signal
import socket

import uvicorn
import uvicorn.config

from model.decode import Answers
from model.serve_api import Served, build_app
from model.serve_queue import OneAtATime, log

KEY_VARIABLE = "LANEFORMER_API_KEY"
GRACE_SECONDS = 20
"""How long requests under way may take to end once the server is told to; then they are cancelled."""


def serve(generate: Answers, served: Served, host: str, port: int, waiting_limit: int) -> None:
    """Answer requests until SIGTERM or SIGINT. Port 0 takes a free one.

    Raises ValueError if the address may not be listened on, OSError if it can't be, and what the model died of.
    """
    api_key = os.environ.get(KEY_VARIABLE)
    with listen(host, port, api_key) as listener, OneAtATime(generate, waiting_limit) as queue:
        server = Server(queue, served, api_key)
        # uvicorn raises the signal that ended it once more afterwards; then this makes no difference any more.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        address = f"[{host}]" if ":" in host else host
        print(f"serving {served.name} at http://{address}:{listener.getsockname()[1]}/v1", flush=True)
        server.run(sockets=[listener])
    if queue.failure:
        raise queue.failure


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """A listening socket. Raises ValueError if others can reach it and there is no key to ask them for."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise OSError(f"host={host} is no address of this machine: {error.strerror}") from None
    if not ipaddress.ip_address(address[0]).is_loopback and not api_key:
        raise ValueError(
            f"host={host} can be reached from other machines: set {KEY_VARIABLE} to a key that clients must "
            "send, or use host=127.0.0.1"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on host={host} port={port}: {error.strerror}") from None
    listener.listen()
    return listener


class Server(uvicorn.Server):
    """The server for a queue. It ends when it is told to, or when the model dies."""

    def __init__(self, queue: OneAtATime, served: Served, api_key: str | None):
        logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
        logs["loggers"][log.name] = {"handlers": ["default"], "level": "INFO", "propagate": False}
        app = build_app(queue, served, api_key)
        # uvicorn's own limit breaks connections off, so it is only for clients that do not read what they are sent.
        limit = GRACE_SECONDS + 5
        super().__init__(
            uvicorn.Config(app, lifespan="off", log_config=logs, timeout_graceful_shutdown=limit)
        )
        self._queue = queue
        queue.on_failure = lambda: setattr(self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests under way end, for GRACE_SECONDS; then cancel them, which their clients are told."""
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._queue.cancel_all)
        await super().shutdown(sockets)
