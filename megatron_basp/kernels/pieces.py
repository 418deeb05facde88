"""What a call has to move: tensors, taken apart where rotary embedding ends within a head. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Piece(NamedTuple):
    """Columns [first, first + columns) of every head of one tensor: all of them rotated, or none.

    tensor: its index. heads: on the sequence's side. per_rank: g, of them with each rank. copies: ranks that have the
    same head.
    """

    tensor: int
    first: int
    columns: int
    rotated: bool
    heads: int
    per_rank: int
    copies: int


@lru_cache(maxsize=1024)
def pieces(
    sequence_side: tuple[Sequence[int], ...],
    ranks_side: tuple[Sequence[int], ...],
    table: Sequence[int] = (0, 0),
    rotated: tuple[int, ...] = (),
) -> tuple[Piece, ...]:
    """The pieces of tensors of the given shapes, [t, heads_i, d_i] and [K, t, g_i, d_i].

    Args:
        table, rotated: the shape [t, r] of the rotary tables, and which tensors they are for.

    Raises:
        ValueError: shapes that don't belong together.
    """
    if not sequence_side or len(sequence_side) != len(ranks_side):
        raise ValueError(f"as many sources as targets are moved, got {len(sequence_side)} and {len(ranks_side)}")
    if any(index not in range(len(sequence_side)) for index in rotated):
        raise ValueError(f"tensors {rotated} cannot be rotated: there are {len(sequence_side)}, counted from 0")
    ranks, tokens = ranks_side[0][:2]
    found = []
    for index, (shape, by_rank) in enumerate(zip(sequence_side, ranks_side, strict=True)):
        heads, size = shape[1:]
        if max(heads, ranks) % min(heads, ranks):
            raise ValueError(f"tensor {index}: heads % K or K % heads must be 0, got {heads} heads and K={ranks}")
        per_rank, copies = max(heads // ranks, 1), max(ranks // heads, 1)
        if (shape[0], *by_rank) != (tokens, ranks, tokens, per_rank, size):
            raise ValueError(
                f"tensor {index}: {list(shape)} on the sequence's side is {[ranks, tokens, per_rank, size]} on the "
                f"side of K={ranks} ranks, with t={tokens} for all tensors, got {list(by_rank)}"
            )
        columns = table[1] if index in rotated else 0
        if columns % 2 or columns > size or (columns and table[0] != tokens):
            raise ValueError(
                f"tensor {index}: rotary tables are [t, r] with r even and r ≤ d, here [{tokens}, ≤ {size}], got "
                f"{list(table)}"
            )
        if columns:
            found.append(Piece(index, 0, columns, True, heads, per_rank, copies))
        if columns < size:
            found.append(Piece(index, columns, size - columns, False, heads, per_rank, copies))
    return tuple(found)
