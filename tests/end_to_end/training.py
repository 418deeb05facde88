"""Real training runs, and what it means that two of them are the same."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from megatron_basp.local_ranks import run_ranks
from megatron_basp.plan import BatchPlan
from tests.end_to_end.whole_parameters import named_gradients, named_parameters

ITERATIONS = 10
LOSS_TOLERANCE = 2e-6  # absolute, of losses between 4 and 7
TOLERANCE = 1e-5  # relative, in the Frobenius norm, of each parameter and its gradient; and of gradient norms
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


@dataclass
class RankReport:
    """What one rank saw.

    place: its ranks in tensor, pipeline and expert parallelism; ranks of one place hold the same parameters.
    samples: for each step, a checksum of every row that its loader gave.
    gradients, parameters: by name, gradients of the first and of the last step (as clipped), parameters at the end.
    """

    place: tuple[int, int, int]
    losses: list[float]
    grad_norms: list[float]
    held_out_losses: list[float]
    mtp_losses: list[list[float]]
    mtp_tokens: list[list[float]]
    expert_losses: list[dict[str, float]]
    samples: list[list[int]]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    plan: BatchPlan | None


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
    from megatron.core import parallel_state

    from megatron_basp.megatron import pretrain_gpt
    from megatron_basp.megatron.recorder import record_training

    runtime = None
    if install:
        from megatron_basp.megatron import hooks

        runtime = hooks.install()
    else:
        assert "megatron_basp.megatron.hooks" not in sys.modules, "a stock run must not know of the hooks"
    sabotage()
    samples: list[list[int]] = [[]]
    gradients: list[dict[str, torch.Tensor]] = []
    chunks: list[Any] = []

    def after_step(record: Any, model: list[Any]) -> None:
        samples.append([])
        step = len(record.grad_norms)
        if step in (1, ITERATIONS):
            gradients.append(dict(named_gradients(model)))
        chunks[:] = model

    forward_step = pretrain_gpt.forward_step

    def observed_step(data_iterator: Any, model: Any) -> Any:
        return forward_step(data_iterator and _observed(data_iterator, samples, mask, model.training), model)

    pretrain_gpt.forward_step = observed_step
    record = record_training(after_step)
    sys.argv = ["pretrain_gpt", *argv]
    pretrain_gpt.main()
    # Not in the last step: with overlap a rank gets the others' shards of the new parameters later.
    parameters = dict(named_parameters(chunks))
    plan = runtime.plan(runtime.settings.micro_batch_size, SEQ_LENGTH) if runtime else None
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    return RankReport(
        place,
        record.losses,
        record.grad_norms,
        record.held_out_losses,
        record.mtp_losses,
        record.mtp_tokens,
        record.expert_losses,
        samples[:-1],
        gradients,
        parameters,
        plan,
    )


def _observed(data_iterator: Any, samples: list[list[int]], mask: str, training: bool) -> Iterator[Any]:
    """The batches, written down, with the loss masks that a test asks for."""
    while True:
        batch = dict(next(data_iterator))
        checksums = [zlib.crc32(row.numpy().tobytes()) for row in batch["tokens"]]
        if training:
            samples[-1] += checksums
        if mask:
            batch["loss_mask"] = batch["loss_mask"] * MASKS[mask](checksums)
        yield batch


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

    Each rank is compared with the reference's rank that holds the same parameters.

    Args:
        gradients: compare these too; a sharded optimizer leaves a rank only a part of them.
        steps: how many there were; some may be skipped.
    """
    last, reference_last = run[-1], reference[-1]
    assert len(last.losses) == len(reference_last.losses) == steps
    assert _largest_difference(last.losses, reference_last.losses) <= LOSS_TOLERANCE, "losses differ"
    assert len(last.held_out_losses) == len(reference_last.held_out_losses) >= 2
    held_out = _largest_difference(last.held_out_losses, reference_last.held_out_losses)
    assert held_out <= LOSS_TOLERANCE, "held-out losses differ"
    assert last.mtp_tokens == reference_last.mtp_tokens, "other tokens in the losses of multi-token prediction"
    for found, expected in zip(last.mtp_losses, reference_last.mtp_losses, strict=True):
        assert _largest_difference(found, expected) <= LOSS_TOLERANCE, "logged losses of multi-token prediction differ"
    for found, expected in zip(last.expert_losses, reference_last.expert_losses, strict=True):
        assert found.keys() == expected.keys()
        assert all(abs(found[name] - expected[name]) <= TOLERANCE * expected[name] for name in found), (
            f"logged losses of experts differ: {found}, not {expected}"
        )
    peers = {report.place: report for report in reference}
    for rank, report in enumerate(run):
        peer = peers[report.place]
        for found, expected in zip(report.grad_norms, peer.grad_norms, strict=True):
            assert abs(found - expected) <= TOLERANCE * expected, (
                f"gradient norm, rank {rank}: {found}, not {expected}"
            )
        if gradients:
            assert len(report.gradients) == len(peer.gradients) == 2
            for step, (found_all, expected_all) in enumerate(zip(report.gradients, peer.gradients, strict=True)):
                assert_close(f"gradient {step}, rank {rank}", found_all, expected_all)
        assert_close(f"parameter, rank {rank}", report.parameters, peer.parameters)


def assert_same_samples(run: list[RankReport], reference: list[RankReport]) -> None:
    """Each step trains on the same rows, each row once, whichever data-parallel rank reads it."""
    assert rows_by_step(run) == rows_by_step(reference)


def rows_by_step(reports: list[RankReport]) -> list[list[int]]:
    """Ranks that read the same rows are one data-parallel replica; the rows of all replicas, sorted, for each step."""
    replicas = {tuple(map(tuple, report.samples)) for report in reports if any(report.samples)}
    return [sorted(itertools.chain(*rows)) for rows in zip(*replicas, strict=True)]


def _largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def assert_close(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each tensor is the expected one, relative to its norm: single entries near 0 are rounding, to Adam too."""
    assert found.keys() == expected.keys() != set()
    for name in expected:
        difference = torch.linalg.vector_norm(found[name] - expected[name]).item()
        norm = torch.linalg.vector_norm(expected[name]).item()  # 0 where a parameter has no part in the loss
        assert difference <= TOLERANCE * norm, f"{what}: {name} differs by {difference}, its norm is {norm}"
