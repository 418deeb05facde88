"""From a micro-batch to the token stream of one rank, and back.

Shapes: a micro-batch tensor is [B, S]; a rank's stream is [1, T] with T = B·S/N, its waves one behind the other, each
wave position-major: [S/K, rows on this rank].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from megatron_basp.plan import BatchPlan, Share


@lru_cache(maxsize=64)
def _rows_and_positions(plan: BatchPlan, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the position of every token of the stream, each [T] int64."""
    rows, positions = [], []
    for share in plan.shares(rank):
        here = torch.arange(share.start, share.stop)
        rows.append(torch.tensor(share.rows).repeat(len(here)))
        positions.append(here.repeat_interleave(len(share.rows)))
    return torch.cat(rows).to(device), torch.cat(positions).to(device)


def stream_rows(plan: BatchPlan, rank: int, device: torch.device) -> Tensor:
    """The row of the micro-batch that every token of the stream belongs to, [T] int64."""
    return _rows_and_positions(plan, rank, device)[0]


def stream_positions(plan: BatchPlan, rank: int, device: torch.device) -> Tensor:
    """The position within its own sequence of every token of the stream, [T] int64."""
    return _rows_and_positions(plan, rank, device)[1]


def take_stream(plan: BatchPlan, rank: int, batch: Tensor) -> Tensor:
    """The part of a micro-batch that `rank` works on.

    Args:
        batch: [B, S] with the plan's B and S.

    Returns:
        [1, T], contiguous.

    Raises:
        ValueError: the batch is not of the plan's shape.
    """
    expected = (len(plan.lengths), plan.lengths[0])
    if tuple(batch.shape) != expected:
        raise ValueError(f"the plan is for a micro-batch of [B, S] = {list(expected)}, got {list(batch.shape)}")
    return batch[_rows_and_positions(plan, rank, batch.device)][None]


def join_streams(plan: BatchPlan, streams: list[Tensor]) -> Tensor:
    """The micro-batch whose streams these are: the inverse of `take_stream` over all ranks.

    Args:
        streams: one tensor [1, T] (or [T]) for each rank of the CP group, in order.

    Returns:
        [B, S].
    """
    batch = streams[0].new_empty(len(plan.lengths), plan.lengths[0])
    for rank, stream in enumerate(streams):
        batch[_rows_and_positions(plan, rank, batch.device)] = stream.reshape(-1)
    return batch


# Gets the index of a wave, this rank's share of it, and its edge.
EdgeOfNext = Callable[[int, Share, Tensor], Tensor]


def roll_stream(plan: BatchPlan, rank: int, stream: Tensor, edge_of_next: EdgeOfNext) -> Tensor:
    """The stream of the micro-batch in which every row is rolled by one position: each token gives way to the next of
    its row, and the last one to 0.

    A wave is position-major, so the next token of a row lies as many places behind as this rank holds rows of the
    wave. Those of the shard's last position lie on the next rank of the group, at its shard's first one: the edge.

    Args:
        stream: [1, T].
        edge_of_next: gets the index of a wave, this rank's share of it and its own edge there, [1, rows], and gives
            the next rank's; zeros at the end of the group, which is the end of its rows.

    Returns:
        [1, T], a tensor of its own.
    """
    parts = []
    shares = plan.shares(rank)
    streams = stream.split([share.tokens for share in shares], dim=1)
    for wave, (share, part) in enumerate(zip(shares, streams, strict=True)):
        rows = len(share.rows)
        parts += [part[:, rows:], edge_of_next(wave, share, part[:, :rows])]
    return torch.cat(parts, dim=1)
