"""Messages between processes: order, large ones in both directions, slow readers, lost and foreign peers, delay."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from model.exchange import Alone, Exchange, SocketExchange
from model.sockets import GREETING, PeerError, connect
from tests.unit.test_delayed_tp import in_threads, meshes


def test_contributions_come_in_order_of_ranks_and_pushes() -> None:
    def work(exchange: Exchange) -> list[list[int]]:
        for number in range(5):
            exchange.push(torch.tensor([10 * number + exchange.rank]))
        return [exchange.collect().flatten().tolist() for _ in range(5)]

    expected = [[10 * number + rank for rank in range(3)] for number in range(5)]
    assert in_threads(3, work) == [expected] * 3


def test_large_messages_cross_in_both_directions() -> None:
    """Far more than the sockets hold: nobody may wait for the other to read first."""

    def work(exchange: Exchange) -> float:
        for number in range(3):
            exchange.push(torch.full((2**22,), float(10**number * (exchange.rank + 1))))
        return sum(float(exchange.collect()[:, [0, -1]].sum()) for _ in range(3))

    assert in_threads(3, work) == [2 * 6 * 111.0] * 3


def test_what_is_pushed_may_be_overwritten_and_what_is_collected_stays() -> None:
    exchange = Alone()
    x = torch.tensor([1.0])
    exchange.push(x)
    exchange.push(x.fill_(2.0))
    first = exchange.collect()
    exchange.push(x.fill_(3.0))
    assert first.item() == 1
    assert [exchange.collect().item(), exchange.collect().item()] == [2, 3]


def test_a_buffer_that_a_slow_peer_still_reads_is_not_used_again() -> None:
    """The peer takes in nothing while this side sends and collects; what was pushed must arrive all the same."""
    ours, theirs = (SocketExchange(mesh) for mesh in meshes(2))
    large = 2**21
    for number in range(4):
        theirs.push(torch.full((large,), 100.0 + number))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_send_on, theirs)
        for number in range(4):
            ours.push(torch.full((large,), float(number)))
            assert ours.collect()[1, -1] == 100 + number
        sending.result()
        closing = pool.submit(ours.close)
        sent = [theirs.collect()[0, [0, -1]].tolist() for _ in range(4)]
        closing.result()
    assert sent == [[float(number)] * 2 for number in range(4)]


def _send_on(exchange: SocketExchange) -> None:
    """Send what is left to send, and read nothing."""
    ((rank, peer),) = exchange.mesh.peers.items()
    while peer.outgoing:
        exchange.mesh._flush(rank, peer)
        time.sleep(0.001)


def test_the_lost_process_is_named_by_all() -> None:
    ours, reporter, _ = (SocketExchange(mesh) for mesh in meshes(3, timeout=30))
    ours.push(torch.zeros(1))
    reporter.push(torch.zeros(1))
    reporter.mesh.timeout = 0.1
    # The third one is alive but silent. Its silence is noticed by one process, which tells the other.
    with pytest.raises(
        PeerError, match=r"process 2 of 3 \(thread 2\) is late: nothing came from it for 0.1 s"
    ):
        reporter.collect()
    with pytest.raises(PeerError, match=r"process 2 of 3 \(thread 2\) is lost, as process 1 says"):
        ours.collect()


def test_who_only_waits_is_not_taken_for_late() -> None:
    """The third one stops after its message has reached one of the two others, which is then a step ahead."""
    ahead, behind, stopped = (SocketExchange(mesh, delay=0) for mesh in meshes(3, timeout=0.3))
    for exchange in (ahead, behind):
        exchange.push(torch.zeros(1))
    silent = stopped.mesh.peers.pop(1)  # to the second it sends nothing
    stopped.push(torch.zeros(1))
    with ThreadPoolExecutor(2) as pool:

        def step_ahead() -> None:
            ahead.collect()
            ahead.push(torch.zeros(1))
            ahead.mesh.timeout = 0.1  # even if it loses patience first
            ahead.collect()

        for waiting in [pool.submit(step_ahead), pool.submit(behind.collect)]:
            with pytest.raises(PeerError, match="process 2 of 3"):
                waiting.result(10)
    silent.connection.close()


def test_a_process_that_ends_is_named() -> None:
    ours, theirs = (SocketExchange(mesh) for mesh in meshes(2))
    theirs.push(torch.zeros(3))
    ours.push(torch.zeros(3))
    theirs.close()
    assert ours.collect().shape == (2, 3)  # what it sent before still counts
    with pytest.raises(PeerError, match=r"process 1 of 2 \(thread 1\) has ended"):
        ours.push(torch.zeros(3))


def test_processes_that_do_different_things() -> None:
    ours, theirs = (SocketExchange(mesh) for mesh in meshes(2))
    theirs.push(torch.zeros(5))
    ours.push(torch.zeros(3))
    with pytest.raises(PeerError, match=r"process 1 of 2 .* sent 20 bytes where 12 belong"):
        ours.collect()


def test_a_simulated_delay() -> None:
    ours, theirs = (SocketExchange(mesh, delay=0.05) for mesh in meshes(2))
    theirs.push(torch.zeros(1))
    theirs.push(torch.zeros(1))
    begin = time.monotonic()
    ours.push(torch.zeros(1))
    ours.push(torch.zeros(1))
    ours.collect()
    first = time.monotonic() - begin
    ours.collect()
    both = time.monotonic() - begin
    assert first > 0.045
    assert both < 0.095  # they were under way at the same time


def test_patience_has_no_limit() -> None:
    ours, theirs = (SocketExchange(mesh) for mesh in meshes(2, timeout=0.05))
    with ThreadPoolExecutor(1) as pool:
        ours.push(torch.zeros(1))
        waiting = pool.submit(ours.collect, patient=True)
        time.sleep(0.3)
        assert not waiting.done()
        theirs.push(torch.ones(1))
        assert waiting.result(10)[1, 0] == 1


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))

    def join(rank: int) -> SocketExchange:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        return SocketExchange(connect(own, rank, 2, timeout=10))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, 0)
        _, port, name = dist.PrefixStore("lanes", store).get("address/0").decode().split(" ", 2)
        assert f"pid {os.getpid()}" in name
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(GREETING.pack(1, b"0" * 32))
            second = pool.submit(join, 1)
            assert stranger.recv(1) == b""  # closed
            exchanges = first.result(20), second.result(20)
        for exchange in exchanges:
            exchange.push(torch.tensor([exchange.rank]))
        assert [exchange.collect().flatten().tolist() for exchange in exchanges] == [[0, 1], [0, 1]]
