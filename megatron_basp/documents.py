"""Where the documents of packed rows begin and end: tokens attend within their own document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Boundaries = tuple[int, ...]
"""The documents of one row: where each begins, ascending from 0, and the row's length S behind them."""


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch, row by row; they cover each row and none crosses into another."""

    by_row: tuple[Boundaries, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each row."""
        return tuple(boundaries[-1] for boundaries in self.by_row)

    def of_rows(self, rows: Sequence[int]) -> tuple[Boundaries, ...]:
        return tuple(self.by_row[row] for row in rows)


def documents_of_rows(cumulative: Sequence[int], lengths: Sequence[int]) -> Documents:
    """Take documents that are given over all rows strung together apart by row.

    Args:
        cumulative: where each document begins, and where the last one ends; documents without tokens are dropped.
        lengths: tokens in each row.

    Raises:
        ValueError: the documents do not cover the rows, or one lies in two rows.
    """
    ends_of_rows = list(accumulate(lengths, initial=0))
    if not cumulative or cumulative[0] != 0 or cumulative[-1] != ends_of_rows[-1]:
        raise ValueError(
            f"documents must cover the micro-batch of {ends_of_rows[-1]} tokens from 0 on, got cumulative lengths "
            f"{_short(cumulative)}"
        )
    if any(stop < start for start, stop in pairwise(cumulative)):
        raise ValueError(f"cumulative lengths of documents must not descend, got {_short(cumulative)}")
    places = sorted(set(cumulative))
    if missing := sorted(set(ends_of_rows) - set(places)):
        raise ValueError(
            f"a document must end where its row does, and none ends at token {missing[0]}, got rows of "
            f"{_short(lengths)} tokens and cumulative lengths {_short(cumulative)}"
        )
    indices = [places.index(end) for end in ends_of_rows]
    return Documents(
        tuple(tuple(place - places[first] for place in places[first : last + 1]) for first, last in pairwise(indices))
    )


def _short(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:12]))}, …]"
