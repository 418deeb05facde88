"""Nodes on one machine: what crosses their links is counted to the byte, takes its time, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_basp.emulated.network import LEAST_BURST_BYTES, Network, refusal
from megatron_basp.local_ranks import in_one_rank, started_ranks
from megatron_basp.megatron.stand_ins import ModelledLink
from tests.namespaces import namespaces, still_in_use

pytestmark = pytest.mark.distributed
MBIT, SENT = 100, 2_000_000


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if why := refusal(2):
        pytest.skip(why)


@pytest.fixture
def in_a_child(tmp_path: Path) -> Callable[[Callable[[], Any]], Any]:
    """Networks stay with their process until it ends: not with pytest's."""
    return lambda function: in_one_rank(function, tmp_path / "logs")


def send(network: Network, sender: int, receiver: int) -> float:
    """Seconds until all has come over."""
    listening, told = os.pipe()
    if os.fork() == 0:
        network.enter(receiver)
        with socket.create_server((network.address(receiver), 5000)) as server:
            os.write(told, b"1")
            connection, _ = server.accept()
            received = 0
            while received < SENT:
                received += len(connection.recv(1 << 20))
            connection.sendall(b"1")
        os._exit(0)
    os.read(listening, 1)
    if os.fork() == 0:
        network.enter(sender)
        with socket.create_connection((network.address(receiver), 5000)) as connection:
            begin = time.perf_counter()
            connection.sendall(bytes(SENT))
            connection.recv(1)
            os.write(told, str(time.perf_counter() - begin).encode())
        os._exit(0)
    seconds = float(os.read(listening, 100))
    os.wait(), os.wait()
    return seconds


def test_what_crosses_is_counted_and_takes_its_time_and_what_stays_is_neither(
    in_a_child: Callable[[Callable[[], Any]], Any],
) -> None:
    def measure() -> tuple[float, int, float, int]:
        network = Network(3)
        network.limit(MBIT)
        start = network.sent_bytes()
        across = send(network, 0, 2)
        between = network.sent_bytes()
        inside = send(network, 1, 1)
        return across, between - start, inside, network.sent_bytes() - between

    across, counted, inside, counted_inside = in_a_child(measure)
    least = (SENT - 2 * LEAST_BURST_BYTES) * 8 / (MBIT * 1e6)
    assert least < across
    assert SENT <= counted <= SENT + 200  # a handshake, an answer of one byte
    assert counted_inside == 0 and inside < least


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        network = Network(2)

        def rank(number: int) -> None:
            network.enter(number)
            time.sleep(600)

        with started_ranks(rank, 2, tmp_path) as started:
            os.write(writer, " ".join(map(str, started.pids)).encode())
            started.wait()
    pids = [parent, *map(int, os.read(reader, 100).split())]
    here, devices = namespaces(["self"]), os.listdir("/sys/class/net")
    for _ in range(200):
        theirs = namespaces(pids)
        if len(theirs) == 3:
            break
        time.sleep(0.05)
    assert len(theirs) == 3 and not theirs & here
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert still_in_use(theirs) == set()
    assert os.listdir("/sys/class/net") == devices


def test_a_modelled_link_takes_as_long_as_a_real_one_would(on_ranks: Callable[..., list[Any]]) -> None:
    def exchange(rank: int) -> tuple[float, float, torch.Tensor]:
        link = ModelledLink([0, 0, 1, 1], latency_seconds=0.05, mbit=MBIT)
        link.install()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        seconds = []
        for group in (dist.group.WORLD, pairs[rank // 2]):
            sent = torch.full((4, 62_500), float(rank))
            received = torch.empty_like(sent)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_to_all_single(received, sent, group=group, async_op=True).wait()
            seconds.append(time.perf_counter() - begin)
            if group is dist.group.WORLD:
                whole = received
        return *seconds, whole[:, 0]

    # Each rank sends 2 · 250 kB to the other node, and two of them share its link.
    least = 0.05 + 2 * 2 * 250_000 * 8 / (MBIT * 1e6)
    for across, inside, received in on_ranks(exchange):
        assert across >= least and inside < least
        assert received.tolist() == [0, 1, 2, 3]
