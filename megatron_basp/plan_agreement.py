"""Ranks that share a micro-batch compare their plans for it.

Every rank computes its plan by itself, from arguments that launchers, environments and edited files can make differ.
Ranks with different plans would wait for each other in different groups, or attend to each other's wrong tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_basp.plan import BatchPlan

# Longer than ranks lag behind each other, shorter than the 10 minutes after which Megatron's groups give up.
TIMEOUT = timedelta(minutes=5)


class PlanMismatch(RuntimeError):
    """Ranks of a context-parallel group have different plans for the same micro-batch."""


def fingerprint(plans: Sequence[BatchPlan], mode: str) -> bytes:
    """The SHA-256 of all that decides which rank holds and sends what: mode, N, lengths, and the waves in order."""
    content = (mode, [(plan.ranks, plan.lengths, plan.waves) for plan in plans])
    return hashlib.sha256(repr(content).encode()).digest()


def describe(plans: Sequence[BatchPlan], mode: str) -> str:
    """For messages: `basp; B=3 S=64 N=4: 2 at K=2, 1 at K=4`."""
    said = [
        f"B={len(plan.lengths)} S={plan.lengths[0]} N={plan.ranks}: "
        + ", ".join(f"{len(wave.rows)} at K={wave.group_size}" for wave in plan.waves)
        for plan in plans
    ]
    return "; ".join([mode, *said])


def check_agreement(
    plans: Sequence[BatchPlan], mode: str, group: dist.ProcessGroup, timeout: timedelta = TIMEOUT
) -> None:
    """Make sure that all ranks of a group have the same plans: an all-gather of 32 bytes a rank, and a wait for it.

    Raises:
        PlanMismatch: they have not, which every rank says; or some rank did not come to compare within `timeout`.
    """
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    own = torch.frombuffer(bytearray(fingerprint(plans, mode)), dtype=torch.uint8).to(device)
    gathered = own.new_empty(group.size() * len(own))
    work = dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise PlanMismatch(
            f"rank {dist.get_rank()} has the plan [{describe(plans, mode)}], and other ranks of its context-parallel "
            f"group did not compare theirs within {timeout.total_seconds():.0f} s: they failed, or run another plan"
        ) from error
    prints = [bytes(row).hex()[:12] for row in gathered.cpu().view(group.size(), -1).tolist()]
    if len(set(prints)) == 1:
        return
    # All ranks see the difference, so that all of them come here.
    said: list[str] = [""] * group.size()
    dist.all_gather_object(said, describe(plans, mode), group=group)
    listed = [
        f"rank {rank} ({print_}) [{plan}]"
        for rank, print_, plan in zip(dist.get_process_group_ranks(group), prints, said, strict=True)
    ]
    raise PlanMismatch(
        f"ranks of a context-parallel group have different plans: {', '.join(listed)}; start all ranks with the same "
        f"flags and the same version of megatron_basp"
    )
