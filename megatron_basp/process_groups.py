"""The process groups that ranks share a sequence in, made from rank lists (`placement.py`).

Every rank of the world creates every group, in the same order, so that no two ranks wait for each other in different
ones. Their number depends on the CP groups and on the K that plans can choose, never on layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_basp.placement import aligned_blocks
from megatron_basp.transport import AllToAll, Transport

NewGroup = Callable[[list[int], str], dist.ProcessGroup]


@dataclass(frozen=True)
class SequenceGroups:
    """This rank's place.

    cp_group: this rank's CP group of N, Megatron's own.
    cp_rank: this rank's index in it (not its global rank).
    by_size: for each K > 1 that plans may choose, the group of K that this rank is in.
    alone: the group of this rank only; what the model takes for its context-parallel group.
    created: how many process groups were made for these in the whole world.
    transports: for each K of `by_size`, what carries the exchange.
    """

    cp_group: dist.ProcessGroup
    cp_rank: int
    by_size: Mapping[int, dist.ProcessGroup]
    alone: dist.ProcessGroup
    created: int
    transports: Mapping[int, Transport]

    @property
    def own(self) -> list[dist.ProcessGroup]:
        """Those of them that this rank is in; where K = N that is the CP group, which was there before."""
        return [group for group in (*self.by_size.values(), self.alone) if group is not self.cp_group]

    def destroy(self) -> None:
        """Give the communicators back, but for the CP group, which is Megatron's to destroy."""
        for transport in self.transports.values():
            transport.close()
        for group in self.own:
            dist.destroy_process_group(group)

    def connect(self) -> int | None:
        """Have the exchange's communicators made now, and not in the first step when memory is at its peak.

        Returns:
            the device memory that they took, in bytes; None over gloo, which takes none. It is what the device has
            less of in the meantime, whoever took it: nobody else should be at the device.
        """
        if "nccl" not in dist.get_backend(self.cp_group):
            return None
        exchanged = {size: torch.zeros(size, device="cuda") for size in self.by_size}
        received = {size: torch.empty_like(tensor) for size, tensor in exchanged.items()}
        torch.cuda.synchronize()
        free_bytes, _ = torch.cuda.mem_get_info()
        for size, group in self.by_size.items():
            dist.all_to_all_single(received[size], exchanged[size], group=group)
        torch.cuda.synchronize()
        return free_bytes - torch.cuda.mem_get_info()[0]


def create_sequence_groups(
    cp_groups: Sequence[Sequence[int]], group_sizes: Iterable[int], cp_group: dist.ProcessGroup, new_group: NewGroup
) -> SequenceGroups:
    """Create the groups. Collective over the whole world, with the same arguments (but for `cp_group`) everywhere.

    Args:
        cp_groups: global ranks of every CP group of the world, in an order that all ranks agree on.
        group_sizes: the K that plans can choose.
        cp_group: this rank's own CP group; serves K = N, so that no second communicator is made for it.
        new_group: makes a group from global ranks and a description.
    """
    here = dist.get_rank()
    by_size: dict[int, dist.ProcessGroup] = {}
    created = dist.get_world_size()  # those of one rank
    for group_size in sorted(set(group_sizes) - {1}):
        if group_size == cp_group.size():
            by_size[group_size] = cp_group
            continue
        for other_cp_ranks in cp_groups:
            for block in aligned_blocks(other_cp_ranks, group_size):
                group = new_group(list(block), f"BASP_SEQUENCE_GROUP_OF_{group_size}")
                created += 1
                if here in block:
                    by_size[group_size] = group
    # Made by its only member: a group of one needs nobody else, and a world of them would take the world's time.
    alone = dist.new_group([here], use_local_synchronization=True, group_desc="BASP_GROUP_OF_ONE")
    transports = {size: AllToAll(group) for size, group in by_size.items()}
    return SequenceGroups(cp_group, cp_group.rank(), by_size, alone, created, transports)
