"""The packing kernels in Triton: one launch for all tensors.

A program moves a tile of tokens × columns of one piece, where columns run through the heads as they lie on the
sequence's side. So a source of fewer heads than ranks is read once and stored for each rank, and back. Head sizes need
not be powers of two: the division by them is by a constant, and vectors stay as wide as their largest power of two
lets them. Offsets have 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_basp.kernels.pieces import pieces
from megatron_basp.kernels.rotary import Rotary

# Four warps with four vectors of 16 bytes a thread in flight. Rotating takes half: it needs registers for tables.
_TILE_BYTES = 8192
_TILE_COLUMNS = 512


def pack_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    _move([_rows(x) for x in sources], targets, rotary, unpack=False)


def unpack_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    _move(targets, [_rows(x) for x in sources], rotary, unpack=True)


def _rows(x: Tensor) -> Tensor:
    """A source whose heads are not contiguous, such as the expanded gradient of a sum, is copied first."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Tile(NamedTuple):
    """How one piece is cut into tiles of rows × columns; the kernel is compiled for it.

    heads, g, copies, tensor, first: as in `Piece`. size: columns of a head that are counted. by_halves: rotated, and a
    column of the first half stands for its partner too. by_neighbours: rotated, and partners lie side by side.
    across: tiles side by side, over all heads.
    """

    tensor: int
    first: int
    size: int
    heads: int
    per_rank: int
    copies: int
    by_halves: bool
    by_neighbours: bool
    rows: int
    columns: int
    across: int


@lru_cache(maxsize=1024)
def _plan_launch(element_bytes: int, tokens: int, interleaved: bool, *shapes: Any) -> tuple[tuple[_Tile, ...], int]:
    """The tiles of each piece, and the number of programs for all."""
    tiles, programs = [], 0
    for piece in pieces(*shapes):
        by_halves, by_neighbours = piece.rotated and not interleaved, piece.rotated and interleaved
        size = piece.columns // 2 if by_halves else piece.columns
        width = piece.heads * size
        columns = min(triton.next_power_of_2(width), _TILE_COLUMNS)
        elements = _TILE_BYTES // element_bytes // (4 if by_halves else 2 if by_neighbours else 1)
        rows = max(elements // columns, 1)
        tiles.append(
            _Tile(
                *(piece.tensor, piece.first, size, piece.heads, piece.per_rank, piece.copies),
                *(by_halves, by_neighbours, rows, columns, triton.cdiv(width, columns)),
            )
        )
        programs += triton.cdiv(tokens, rows) * tiles[-1].across
    return tuple(tiles), programs


def _move(sequence_side: Sequence[Tensor], ranks_side: Sequence[Tensor], rotary: Rotary | None, unpack: bool) -> None:
    first = sequence_side[0]
    shapes: list[Any] = [tuple(x.shape for x in side) for side in (sequence_side, ranks_side)]
    if rotary:
        shapes += [rotary.cos.shape, rotary.rotated]
    interleaved = rotary is not None and rotary.interleaved
    tiles, programs = _plan_launch(first.element_size(), len(first), interleaved, *shapes)
    if not programs:
        return
    cos, sin = (rotary.cos, rotary.sin) if rotary else (first, first)
    _move_tiles[(programs,)](
        tuple(sequence_side),
        tuple(ranks_side),
        tuple(x.stride()[:-1] for x in sequence_side),
        tuple(x.stride()[:-1] for x in ranks_side),
        cos,
        sin,
        cos.stride(0),
        sin.stride(0),
        first.shape[0],
        TILES=tiles,
        UNPACK=unpack,
    )


@triton.jit(do_not_specialize=["tokens"])
def _move_tiles(
    sequence_side,
    ranks_side,
    sequence_strides,
    ranks_strides,
    cos,
    sin,
    cos_stride,
    sin_stride,
    tokens,
    TILES: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """sequence_side, ranks_side: pointers; *_strides: [token, head] and [rank, token, head] of each."""
    # Counted down, so that the tiles of each piece begin with 0.
    tile = tl.program_id(0)
    for piece in tl.static_range(len(TILES)):
        tiles = tl.cdiv(tokens, TILES[piece].rows) * TILES[piece].across
        if (tile >= 0) & (tile < tiles):
            tensor: tl.constexpr = TILES[piece].tensor
            _move_tile(
                sequence_side[tensor],
                ranks_side[tensor],
                sequence_strides[tensor],
                ranks_strides[tensor],
                cos,
                sin,
                cos_stride,
                sin_stride,
                tokens,
                tile,
                TILES[piece],
                UNPACK,
            )
        tile -= tiles


@triton.jit
def _move_tile(
    heads,
    by_rank,
    heads_strides,
    by_rank_strides,
    cos,
    sin,
    cos_stride,
    sin_stride,
    tokens,
    tile,
    TILE: tl.constexpr,
    UNPACK: tl.constexpr,
):
    SIZE: tl.constexpr = TILE.size
    PER_RANK: tl.constexpr = TILE.per_rank
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    WIDTH: tl.constexpr = TILE.heads * SIZE

    row = (tile // TILE.across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    counted = tile % TILE.across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < tokens) & (counted < WIDTH)
    head = (counted // SIZE).to(tl.int64)
    column = counted % SIZE
    heads += row * heads_strides[0] + head * heads_strides[1] + (TILE.first + column)
    rank, head_of_rank = head // PER_RANK * TILE.copies, head % PER_RANK
    by_rank += rank * by_rank_strides[0] + row * by_rank_strides[1] + head_of_rank * by_rank_strides[2]
    by_rank += TILE.first + column
    cos += row * cos_stride + column
    sin += row * sin_stride + column

    source = by_rank if UNPACK else heads
    target = heads if UNPACK else by_rank
    READ: tl.constexpr = TILE.copies if UNPACK else 1
    WRITTEN: tl.constexpr = 1 if UNPACK else TILE.copies
    x = _sum_of_copies(source, by_rank_strides[0], mask, READ)
    if TILE.by_halves:
        partner = _sum_of_copies(source + SIZE, by_rank_strides[0], mask, READ)
        x, partner = _rotated(x, partner, cos, sin, SIZE, mask, UNPACK)
        _write_copies(target + SIZE, partner, by_rank_strides[0], mask, WRITTEN)
    if TILE.by_neighbours:
        x = _rotated_by_neighbours(x, cos, sin, mask, ROWS, COLUMNS, UNPACK)
    _write_copies(target, x, by_rank_strides[0], mask, WRITTEN)


@triton.jit
def _sum_of_copies(source, stride, mask, COPIES: tl.constexpr):
    """In order of the ranks; a single copy stays in its dtype."""
    x = tl.load(source, mask)
    if COPIES > 1:
        x = _wide(x)
        for _ in tl.static_range(1, COPIES):
            source += stride
            x += _wide(tl.load(source, mask))
    return x


@triton.jit
def _write_copies(target, x, stride, mask, COPIES: tl.constexpr):
    for _ in tl.static_range(COPIES):
        tl.store(target, x.to(target.dtype.element_ty), mask)
        target += stride


@triton.jit
def _rotated(a, b, cos, sin, HALF: tl.constexpr, mask, BACK: tl.constexpr):
    a, b = _wide(a), _wide(b)
    cos_a, cos_b = _wide(tl.load(cos, mask)), _wide(tl.load(cos + HALF, mask))
    sin_a, sin_b = _wide(tl.load(sin, mask)), _wide(tl.load(sin + HALF, mask))
    if BACK:
        return a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def _rotated_by_neighbours(x, cos, sin, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr):
    x, cos, sin = _wide(x), _wide(tl.load(cos, mask)), _wide(tl.load(sin, mask))
    if BACK:
        return x * cos - _quarter_turn(x * sin, ROWS, COLUMNS)
    else:
        return x * cos + _quarter_turn(x, ROWS, COLUMNS) * sin


@triton.jit
def _quarter_turn(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(a, b) -> (-b, a) for neighbours."""
    a, b = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    return tl.reshape(tl.join(-b, a), (ROWS, COLUMNS))


@triton.jit
def _wide(x):
    return x.to(tl.float32) if x.dtype.primitive_bitwidth < 32 else x
