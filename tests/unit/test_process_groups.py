"""Communicators of the groups. (The groups themselves: tests/distributed/test_sequence_groups.py)"""

import torch
import torch.distributed as dist

from megatron_basp.process_groups import SequenceGroups


def connected(monkeypatch, backend):
    """What `connect` gives on a device of 1000 bytes of which each communicator takes 100, and the calls it makes.

    A contract with stand-ins: this has not run on a GPU.
    """
    calls = []

    def zeros(size, device):
        calls.append(f"{size} elements on {device}")
        return torch.ones(size)

    def exchange(received, sent, group):
        assert received.shape == sent.shape and received is not sent
        calls.append(group)

    def free():
        calls.append("free")
        return 1000 - 100 * sum(call in ("two", "cp") for call in calls), 2000

    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    return SequenceGroups("cp", 0, {2: "two", 4: "cp"}, "alone", created=6, transports={}).connect(), calls


def test_communicators_are_made_at_the_start_and_their_memory_is_what_the_device_has_less(monkeypatch):
    memory, calls = connected(monkeypatch, "nccl")
    assert memory == 200
    # Nothing is allocated, and nothing runs, between the two looks at the memory but the exchanges.
    assert calls == ["2 elements on cuda", "4 elements on cuda", "wait", "free", "two", "cp", "wait", "free"]


def test_over_gloo_there_is_nothing_to_measure_and_nothing_is_sent(monkeypatch):
    assert connected(monkeypatch, "gloo") == (None, [])
