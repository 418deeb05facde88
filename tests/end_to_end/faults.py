"""Faults that more than one test puts into the code, to see that they are found."""

from __future__ import annotations

from dataclasses import replace


def gradient_of_one_kv_copy() -> None:
    from megatron_basp import all_to_all

    unpack_heads = all_to_all.unpack_heads

    def first_copy_only(sources, targets, rotary):  # type: ignore[no-untyped-def]
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            copies = max(1, source.shape[0] // target.shape[1])
            rotated = rotary is not None and index in rotary.rotated
            unpack_heads([source[::copies]], [target], replace(rotary, rotated=(0,)) if rotated else None)

    all_to_all.unpack_heads = first_copy_only
