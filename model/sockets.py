"""A full mesh of TCP connections between the processes of one decoding job.

A message is a header and raw bytes. Nothing here blocks but `receive`, and that one also sends what could not be
sent before, so that two processes with full buffers never wait for each other. A process that ends or falls
silent is named in a PeerError, which is passed on, so that all the others name the same one.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from model.exchange import Slot

HEADER = struct.Struct("<qd")  # bytes that follow, or -1 - rank of a process that is lost; when it was sent
GREETING = struct.Struct("<i32s")  # rank, the job's secret
CONNECT_SECONDS = 120.0
GRACE_SECONDS = 1.0
# A large message should fit, so that it is handed over in one call.
BUFFER_BYTES = 4 << 20


class PeerError(RuntimeError):
    """Another process of the job has ended, is late or does something else; the message names it."""


class Peer:
    """One connection, with what is on its way in both directions."""

    def __init__(self, connection: socket.socket, name: str):
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        connection.setblocking(False)
        self.connection = connection
        self.name = name
        self.outgoing: deque[tuple[memoryview, Slot | None]] = deque()
        self.received = 0
        """Messages that have arrived whole."""
        self.header = bytearray(HEADER.size)
        self.header_filled = 0
        self.filled = 0
        """Bytes of the message under way."""


class Mesh:
    """This process's connections to all others. timeout: seconds that a peer may be late."""

    def __init__(self, rank: int, peers: dict[int, Peer], timeout: float):
        self.rank = rank
        self.size = len(peers) + 1
        self.peers = peers
        self.timeout = timeout
        self.delay = 0.0
        self.collected = 0

    # Sending

    def send(self, slot: Slot) -> None:
        """Send this process's part of the slot to all, as far as the sockets take it now."""
        own = slot.raw[self.rank]
        header = memoryview(HEADER.pack(len(own), time.monotonic()))
        slot.to_send = len(self.peers)
        slot.ready = 0.0
        for rank, peer in self.peers.items():
            peer.outgoing.append((header, None))
            peer.outgoing.append((own, slot))
            self._flush(rank, peer)

    def _flush(self, rank: int, peer: Peer) -> None:
        try:
            while peer.outgoing:
                # Header and payload in one packet: two small ones would cost two wake-ups of the receiver.
                parts = [part for part, _ in list(peer.outgoing)[:2]]
                sent = peer.connection.sendmsg(parts)
                while peer.outgoing and sent >= len(peer.outgoing[0][0]):
                    part, slot = peer.outgoing.popleft()
                    sent -= len(part)
                    if slot is not None:
                        slot.to_send -= 1
                if sent:
                    part, slot = peer.outgoing[0]
                    peer.outgoing[0] = (part[sent:], slot)
        except BlockingIOError:
            return
        except OSError:
            # What it sent before it ended may still say why.
            self._read_farewell(rank, peer)

    # Receiving

    def receive(self, pending: Sequence[Slot], patient: bool = False) -> None:
        """Return when the first of the pending slots is complete. patient: wait without limit for a late peer."""
        deadline = None if patient else time.monotonic() + self.timeout
        ahead: set[int] = set()
        while missing := [
            rank for rank, peer in self.peers.items() if not self._advance(rank, peer, pending)
        ]:
            others = self.peers.keys() - ahead - set(missing)
            self._wait(missing, others, deadline)
            ahead |= {rank for rank in others if self._is_ahead(rank)}
        self.collected += 1
        if self.delay:
            time.sleep(max(0.0, pending[0].ready - time.monotonic()))

    def _advance(self, rank: int, peer: Peer, pending: Sequence[Slot]) -> bool:
        """Take in what has arrived; whether the first pending slot has this peer's part."""
        if peer.outgoing:
            self._flush(rank, peer)
        try:
            while (at := peer.received - self.collected) < len(pending):
                if not self._read(rank, peer, pending[at]):
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.fail(rank, "has ended")
        return peer.received > self.collected

    def _read(self, rank: int, peer: Peer, slot: Slot) -> bool:
        """Read on in the peer's next message, which belongs into the slot; False if it needs more."""
        payload = slot.raw[rank]
        if peer.header_filled < HEADER.size:
            peer.header_filled += self._fill(rank, peer, memoryview(peer.header)[peer.header_filled :])
            if peer.header_filled < HEADER.size:
                return False
            count, sent_at = HEADER.unpack(peer.header)
            if count < 0:
                self.fail(-1 - count, f"is lost, as process {rank} says")
            if count != len(payload):
                self.fail(rank, f"sent {count} bytes where {len(payload)} belong: it runs something else")
            slot.ready = max(slot.ready, sent_at + self.delay)
        if peer.filled < len(payload):
            peer.filled += self._fill(rank, peer, payload[peer.filled :])
            if peer.filled < len(payload):
                return False
        peer.header_filled = peer.filled = 0
        peer.received += 1
        return True

    def _fill(self, rank: int, peer: Peer, into: memoryview) -> int:
        count = peer.connection.recv_into(into)
        if count == 0:
            self.fail(rank, "has ended")
        return count

    def _is_ahead(self, rank: int) -> bool:
        """Whether more has come from a peer that owes nothing now: its next message, or its end. Raises PeerError
        if it says that another is lost."""
        with suppress(BlockingIOError, ConnectionError):
            begin = self.peers[rank].connection.recv(HEADER.size, socket.MSG_PEEK)
            if len(begin) == HEADER.size and (count := HEADER.unpack(begin)[0]) < 0:
                self.fail(-1 - count, f"is lost, as process {rank} says")
            return True
        return False

    def _wait(self, missing: list[int], others: Collection[int], deadline: float | None) -> None:
        """Until a socket of these, or one that has more to send, is ready. Raises PeerError after the deadline."""
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and len(missing) > 1:
            # Some of them may only be waiting too. Whoever is furthest behind misses nobody but the lost one, and
            # is left the time to say so.
            seconds += GRACE_SECONDS
        if seconds is not None and seconds <= 0:
            self.fail(missing[0], f"is late: nothing came from it for {self.timeout:g} s")
        reading = [self.peers[rank].connection for rank in (*missing, *others)]
        writing = [peer.connection for peer in self.peers.values() if peer.outgoing]
        select.select(reading, writing, [], seconds)

    # Ending

    def _read_farewell(self, rank: int, peer: Peer) -> None:
        """Name who is lost, after a connection broke: the peer, unless it said that another is."""
        with suppress(OSError):
            rest = peer.connection.recv(1 << 16)
            if len(rest) >= HEADER.size and peer.header_filled == peer.filled == 0:
                count, _ = HEADER.unpack(rest[-HEADER.size :])
                if -self.size <= count < 0:
                    self.fail(-1 - count, f"is lost, as process {rank} says")
        self.fail(rank, "has ended")

    def fail(self, rank: int, what: str) -> None:
        """Tell the others that this process is lost, close all, and raise PeerError."""
        name = self.peers[rank].name if rank in self.peers else "this one"
        farewell = HEADER.pack(-1 - rank, time.monotonic())
        for peer in self.peers.values():
            with suppress(OSError):
                if not peer.outgoing:  # in the middle of a message it would be taken for a part of it
                    peer.connection.send(farewell)
        self._close_all()
        raise PeerError(f"process {rank} of {self.size} ({name}) {what}")

    def close(self) -> None:
        """Send what is left, then close."""
        deadline = time.monotonic() + self.timeout
        with suppress(PeerError):
            while any(peer.outgoing for peer in self.peers.values()) and time.monotonic() < deadline:
                for rank, peer in self.peers.items():
                    self._flush(rank, peer)
                time.sleep(0.001)
        self._close_all()

    def _close_all(self) -> None:
        for peer in self.peers.values():
            peer.connection.close()


def connect(store: Any, rank: int, size: int, timeout: float) -> Mesh:
    """Connect all processes, which find each other through a torch.distributed store.

    Raises PeerError if they do not all arrive. Strangers who connect to the port without the job's secret are
    turned away.
    """
    store = dist.PrefixStore("lanes", store)
    store.set_timeout(timedelta(seconds=CONNECT_SECONDS))
    if rank == 0:
        store.set("secret", secrets.token_hex(16))
    host = _own_address()
    peers: dict[int, Peer] = {}
    with socket.create_server((host, 0), backlog=size) as server:
        name = f"pid {os.getpid()} on {socket.gethostname()}"
        store.set(f"address/{rank}", f"{host} {server.getsockname()[1]} {name}")
        try:
            secret = store.get("secret")
            addresses = [store.get(f"address/{other}").decode().split(" ", 2) for other in range(size)]
        except dist.DistError as error:
            raise PeerError(f"not all {size} processes came within {CONNECT_SECONDS:g} s: {error}") from None
        for other in range(rank):
            address, port, name = addresses[other]
            connection = socket.create_connection((address, int(port)), CONNECT_SECONDS)
            connection.sendall(GREETING.pack(rank, secret))
            peers[other] = Peer(connection, name)
        deadline = time.monotonic() + CONNECT_SECONDS
        while len(peers) < size - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                other, connection = _greet(server, secret)
            except TimeoutError:
                lacking = [r for r in range(size) if r != rank and r not in peers]
                raise PeerError(f"processes {lacking} did not connect to process {rank}") from None
            if other in range(rank + 1, size) and other not in peers:
                peers[other] = Peer(connection, addresses[other][2])
            else:
                connection.close()
    return Mesh(rank, dict(sorted(peers.items())), timeout)


def _greet(server: socket.socket, secret: bytes) -> tuple[int, socket.socket]:
    """Accept one connection; its rank is -1 if it does not know the secret."""
    connection, _ = server.accept()
    connection.settimeout(5)
    try:
        rank, said = GREETING.unpack(connection.recv(GREETING.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return -1, connection
    return (rank if hmac.compare_digest(said, secret) else -1), connection


def _own_address() -> str:
    """The address by which the others reach this process: that of the interface towards the store."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
