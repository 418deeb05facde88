"""Real training runs, and what it means that two of them are the same."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from megatron_basp.comparison import BOUNDS, RankReport, compare, relative_difference, rows_by_step
from megatron_basp.local_ranks import run_ranks

ITERATIONS = 10
LOSS_TOLERANCE, TOLERANCE = BOUNDS.loss, BOUNDS.parameter
SEQ_LENGTH = 64

MODEL = f"""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --seq-length {SEQ_LENGTH}
    --max-position-embeddings {SEQ_LENGTH} --swiglu --normalization RMSNorm --disable-bias-linear
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0
    --no-gradient-accumulation-fusion --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
"""
ROPE = "--position-embedding-type rope"
GQA = "--group-query-attention --num-query-groups 4"
TRAINING = f"""
    --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0
    --adam-eps 1e-5
    --split 90,10,0 --num-workers 0 --eval-iters 2 --eval-interval {ITERATIONS + 1} --log-interval 1
"""


def batch(micro: int, micro_batches: int = 2, data_parallel: int = 1) -> str:
    """Flags for micro-batches of B sequences, so many of them to a step."""
    return f"--micro-batch-size {micro} --global-batch-size {micro * micro_batches * data_parallel}"


def cp(ranks: int) -> str:
    return f"--context-parallel-size {ranks}"


class Trainer:
    """Starts runs; the ones that serve as references are run once."""

    def __init__(self, data_flags: list[str], folder: Path) -> None:
        self.data_flags = data_flags
        self.folder = folder
        self._numbers = itertools.count()
        self.stock = lru_cache(maxsize=None)(self._stock)

    def _stock(
        self, flags: str, ranks: int = 1, mask: str = "", prepare: Callable[[], None] = lambda: None
    ) -> list[RankReport]:
        """Megatron alone: no hook of ours is imported, and attention is its own `DotProductAttention`, unless
        `prepare`, called on each rank, puts in another."""
        return self._run(flags, ranks, mask, install=False, sabotage=prepare)

    def planned(
        self,
        flags: str,
        ranks: int,
        mask: str = "",
        mode: str = "basp",
        sabotage: Callable[[], None] = lambda: None,
    ) -> list[RankReport]:
        """The same under a sequence-parallel mode. `sabotage` is called on each rank when the hooks are in."""
        return self._run(f"{flags} --sequence-parallel-mode {mode}", ranks, mask, install=True, sabotage=sabotage)

    def _run(
        self,
        flags: str,
        ranks: int,
        mask: str,
        install: bool,
        sabotage: Callable[[], None] = lambda: None,
    ) -> list[RankReport]:
        argv = [*MODEL.split(), *TRAINING.split(), *self.data_flags, *flags.split()]
        logs = self.folder / "logs" / str(next(self._numbers))
        return run_ranks(lambda rank: _train(argv, mask, install, sabotage), ranks, logs)


def _train(argv: list[str], mask: str, install: bool, sabotage: Callable[[], None]) -> RankReport:
    if not install:
        assert "megatron_basp.megatron.hooks" not in sys.modules, "a stock run must not know of the hooks"
    from megatron_basp.megatron.observed_run import observe_training

    return observe_training(argv, ITERATIONS, planned=install, before=sabotage, make_mask=MASKS.get(mask))


def _uneven(checksums: list[int]) -> torch.Tensor:
    """Some rows keep a third of their tokens, some one in eleven, some one; which ones, their content says."""
    strides = torch.tensor([(3, 11, SEQ_LENGTH)[checksum % 3] for checksum in checksums])
    return torch.arange(SEQ_LENGTH)[None] % strides[:, None] == 0


def _one_token(checksums: list[int]) -> torch.Tensor:
    """One token of one row: most ranks have none to take a loss of."""
    kept = torch.zeros(len(checksums), SEQ_LENGTH, dtype=torch.bool)
    kept[checksums.index(max(checksums)), max(checksums) % SEQ_LENGTH] = True
    return kept


MASKS = {"uneven": _uneven, "one token": _one_token}


def assert_same_training(
    run: list[RankReport], reference: list[RankReport], gradients: bool = True, steps: int = ITERATIONS
) -> None:
    """Losses, gradient norms, every gradient and the parameters at the end are those of the reference.

    Args:
        gradients: compare these too; skipped steps leave none.
        steps: how many there were; some may be skipped.
    """
    assert len(run[-1].losses) == len(reference[-1].losses) == steps
    assert len(run[-1].held_out_losses) == len(reference[-1].held_out_losses) >= 2
    differing = compare(run, reference, gradients).beyond()
    assert not differing, "\n".join(differing)


def assert_same_samples(run: list[RankReport], reference: list[RankReport]) -> None:
    """Each step trains on the same rows, each row once, whichever data-parallel rank reads it."""
    assert len(rows_by_step(run)) == ITERATIONS
    assert rows_by_step(run) == rows_by_step(reference)


def assert_close(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each tensor is the expected one, relative to its norm."""
    assert found.keys() == expected.keys() != set()
    for name in expected:
        difference = relative_difference(found[name], expected[name])
        assert difference <= TOLERANCE, f"{what}: {name} differs by {difference}"
