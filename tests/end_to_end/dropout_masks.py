"""Which elements a run dropped: written down, put together for the whole micro-batch, dropped again by another run.

A micro-batch calls dropout for the embedding, then in each layer for attention and twice for the hidden state.
Shapes: hidden masks are [T, 1, h] on a rank and [S, B, h] in one process; attention masks are [rows, H/K, S, S] for
each wave on a rank and [B, H, S, S] in one process. True is what was kept.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_basp.plan import BatchPlan


class MicroBatch(NamedTuple):
    """The masks of one rank for one micro-batch.

    hidden: by call. attention: by layer, then by wave.
    """

    hidden: list[Tensor]
    attention: list[list[Tensor]]


def recording(folder: Path) -> Callable[[], None]:
    """To be called on each rank: from then on every mask is written down, and a digest of each random state that
    Megatron saves, after each step."""

    def start() -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        from megatron_basp.megatron.seam import replace
        from megatron_basp.sdpa import CausalSDPA

        file = folder / os.environ["RANK"]

        def write(kind: str, what: Any) -> None:
            with file.open("ab") as stream:
                pickle.dump((kind, what), stream)

        def states() -> tuple[Tensor, dict[str, Tensor]]:
            return torch.get_rng_state(), get_cuda_rng_tracker().get_states()

        def set_states(default: Tensor, tracked: dict[str, Tensor]) -> None:
            torch.set_rng_state(default)
            get_cuda_rng_tracker().set_states(tracked)

        def drawn_again(before: tuple[Any, Any], draw: Callable[[], Tensor]) -> Tensor:
            after = states()
            set_states(*before)
            with torch.no_grad():
                result = draw()
            assert all(map(torch.equal, states()[1].values(), after[1].values())), "another number of draws"
            set_states(*after)
            return result

        def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            before = states()
            output = plain_dropout(x, p, training, inplace)
            if training and p:
                kept = drawn_again(before, lambda: plain_dropout(torch.ones_like(x), p)) != 0
                assert not output[~kept].any()
                write("hidden", kept)
            return output

        def attend(self: CausalSDPA, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            before = states()
            output = plain_attend(self, query, key, value)
            if self.training and self.dropout:
                # With one-hot values the output is the weights themselves.
                length, rows, kv_heads, _ = value.shape
                one_hot = torch.eye(length)[:, None, None].expand(length, rows, kv_heads, length)
                weights = drawn_again(before, lambda: plain_attend(self, query, key, one_hot))
                write("attention", weights.unflatten(2, (-1, length)).permute(1, 2, 0, 3) != 0)
            return output

        def step(original: Callable[..., Any]) -> Callable[..., Any]:
            def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(forward_step_func, data_iterator, model, *args, **kwargs)
                default, tracked = states()
                write("states", {name: _digest(state) for name, state in {"default": default, **tracked}.items()})
                return result

            return train_step

        plain_dropout, plain_attend = F.dropout, CausalSDPA.forward
        F.dropout, CausalSDPA.forward = dropout, attend
        replace("megatron.training.training:train_step", ["forward_step_func", "data_iterator", "model"], step)

    return start


def _digest(state: Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def _written(folder: Path, rank: int, kind: str | None = None) -> list[tuple[str, Any]]:
    def read() -> Iterator[tuple[str, Any]]:
        with (folder / str(rank)).open("rb") as stream:
            while stream.peek(1):
                yield pickle.load(stream)

    return [(found, what) for found, what in read() if kind in (None, found)]


def read_states(folder: Path, rank: int) -> list[dict[str, str]]:
    """For each step, a digest of each random state after it."""
    return [what for _, what in _written(folder, rank, "states")]


def read_masks(folder: Path, rank: int, layers: int, waves: int) -> list[MicroBatch]:
    """What a rank dropped, micro-batch by micro-batch."""
    masks = [(kind, what) for kind, what in _written(folder, rank) if kind != "states"]
    calls = ["hidden", *(["attention"] * waves + ["hidden"] * 2) * layers]
    batches = []
    for first in range(0, len(masks), len(calls)):
        kinds, tensors = zip(*masks[first : first + len(calls)], strict=True)
        assert list(kinds) == calls, kinds
        hidden = [x for kind, x in zip(kinds, tensors, strict=True) if kind == "hidden"]
        attention = [x for kind, x in zip(kinds, tensors, strict=True) if kind == "attention"]
        batches.append(MicroBatch(hidden, [attention[i * waves : (i + 1) * waves] for i in range(layers)]))
    return batches


def whole_masks(plan: BatchPlan, by_rank: Sequence[MicroBatch]) -> Iterator[Tensor]:
    """The masks of a micro-batch as one process would draw them, in the order of its calls.

    Args:
        by_rank: what each rank of a CP group dropped.
    """
    hidden = (whole_hidden_mask(plan, calls) for calls in zip(*(masks.hidden for masks in by_rank), strict=True))
    yield next(hidden)
    for layers in zip(*(masks.attention for masks in by_rank), strict=True):
        yield whole_attention_mask(plan, layers)
        yield next(hidden)
        yield next(hidden)


def whole_hidden_mask(plan: BatchPlan, by_rank: Sequence[Tensor]) -> Tensor:
    """[T, 1, h] of each rank -> [S, B, h]."""
    whole = by_rank[0].new_empty(plan.lengths[0], len(plan.lengths), by_rank[0].shape[-1])
    for rank, mask in enumerate(by_rank):
        shares = plan.shares(rank)
        parts = mask.squeeze(1).split([share.tokens for share in shares])
        for share, part in zip(shares, parts, strict=True):
            whole[share.start : share.stop, list(share.rows)] = part.unflatten(0, (-1, len(share.rows)))
    return whole


def whole_attention_mask(plan: BatchPlan, by_rank: Sequence[Sequence[Tensor]]) -> Tensor:
    """[rows, H/K, S, S] of each rank and wave -> [B, H, S, S]."""
    heads = by_rank[0][0].shape[1] * plan.waves[0].group_size
    whole = by_rank[0][0].new_empty(len(plan.lengths), heads, plan.lengths[0], plan.lengths[0])
    for rank, masks in enumerate(by_rank):
        for share, mask in zip(plan.shares(rank), masks, strict=True):
            first = share.rank_in_group * mask.shape[1]
            whole[list(share.rows), first : first + mask.shape[1]] = mask
    return whole


def replaying(masks_of_rank: Sequence[Sequence[Tensor]]) -> Callable[..., Tensor]:
    """A dropout that keeps what it is told to, call by call; what `torch.nn.functional.dropout` becomes."""
    plain_dropout, calls = F.dropout, [iter(masks) for masks in masks_of_rank]

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return plain_dropout(x, p, training, inplace)
        kept = next(calls[int(os.environ["RANK"])])
        assert kept.shape == x.shape, (kept.shape, x.shape)
        return x * kept / (1 - p)

    return dropout
