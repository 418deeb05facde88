"""Faults that more than one test puts into the code, to see that they are found."""

from __future__ import annotations


def gradient_of_one_kv_copy() -> None:
    from megatron_basp import all_to_all

    from_ranks = all_to_all._from_ranks

    def first_copy_only(x, shape):  # type: ignore[no-untyped-def]
        tokens, heads, head_size = shape
        if heads < x.shape[0]:
            return x.reshape(heads, -1, tokens, head_size)[:, 0].transpose(0, 1).contiguous()
        return from_ranks(x, shape)

    all_to_all._from_ranks = first_copy_only
