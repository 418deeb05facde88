"""What a rank needs of its neighbour in the group where rows are rolled by one position: multi-token prediction."""

from __future__ import annotations

from torch import Tensor

from megatron_basp.all_to_all import ExchangeGroup, start


def from_next_rank(x: Tensor, where: ExchangeGroup) -> Tensor:
    """What the next rank of the group passed, and zeros on the last one; x is [n], the same n on all ranks.

    It is for ids, positions, labels and masks, which have no gradient.
    """
    here, last = where.group.rank(), where.size - 1
    sent_rows, received_rows = [0] * where.size, [0] * where.size
    if here > 0:
        sent_rows[here - 1] = len(x)
    if here < last:
        received_rows[here + 1] = len(x)
    received = x.new_zeros(len(x), 1)
    sent, arriving = x[: sum(sent_rows), None].contiguous(), received[: sum(received_rows)]
    start([sent], [arriving], sent_rows, received_rows, where, "roll", "forward").arrived()
    return received[:, 0]
