"""Dropout: with the masks that a run drew, one process trains the same; and how those masks were drawn."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.end_to_end.dropout_masks import (
    MicroBatch,
    read_masks,
    read_states,
    recording,
    replaying,
    whole_masks,
)
from tests.end_to_end.training import (
    GQA,
    ITERATIONS,
    ROPE,
    RankReport,
    Trainer,
    assert_same_samples,
    assert_same_training,
    batch,
    cp,
)

LAYERS, MICRO_BATCHES = 2, 2
HIDDEN, ATTENTION = 0.1, 0.2
FLAGS = f"{GQA} {ROPE} {batch(3, MICRO_BATCHES)} --hidden-dropout {HIDDEN} --attention-dropout {ATTENTION}"


@dataclass
class RecordedRun:
    """A run with what it dropped.

    masks: by tensor-parallel rank, then by rank in the CP group, then by micro-batch.
    states: digests of random states after each step, by the same ranks.
    """

    tensor_parallel: int
    run: list[RankReport]
    masks: list[list[list[MicroBatch]]]
    states: list[list[list[dict[str, str]]]]


def _record(trainer: Trainer, folder: Path, ranks: int, tensor_parallel: int) -> RecordedRun:
    flags = f"{FLAGS} {cp(ranks // tensor_parallel)} --tensor-model-parallel-size {tensor_parallel}"
    run = trainer.planned(flags, ranks, sabotage=recording(folder))
    waves = len(run[0].plan.waves)
    assert waves == 2, "the hard case"
    # Tensor-parallel ranks lie next to each other.
    places = [range(tp_rank, ranks, tensor_parallel) for tp_rank in range(tensor_parallel)]
    return RecordedRun(
        tensor_parallel,
        run,
        [[read_masks(folder, rank, LAYERS, waves) for rank in place] for place in places],
        [[read_states(folder, rank) for rank in place] for place in places],
    )


@pytest.fixture(scope="module")
def four_ranks(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return _record(trainer, tmp_path_factory.mktemp("masks"), ranks=4, tensor_parallel=1)


@pytest.fixture(scope="module")
def two_by_two(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Two context-parallel ranks, two tensor-parallel ones."""
    return _record(trainer, tmp_path_factory.mktemp("masks"), ranks=4, tensor_parallel=2)


@pytest.fixture(params=["four_ranks", "two_by_two"])
def recorded(request: pytest.FixtureRequest) -> RecordedRun:
    return request.getfixturevalue(request.param)


@pytest.mark.supports("Training", "attention and hidden dropout", "one process that drops the same elements")
def test_one_process_that_drops_the_same_elements_trains_the_same(
    trainer: Trainer, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = recorded.run[0].plan
    masks = [
        list(itertools.chain(*(whole_masks(plan, by_rank) for by_rank in zip(*place, strict=True))))
        for place in recorded.masks
    ]
    monkeypatch.setattr(F, "dropout", replaying(masks))
    reference = trainer.stock(
        f"{FLAGS} --tensor-model-parallel-size {recorded.tensor_parallel}", ranks=recorded.tensor_parallel
    )
    assert_same_training(recorded.run, reference)
    assert_same_samples(recorded.run, reference)


def _within_chance(kept: torch.Tensor, probability: float) -> bool:
    """Whether so many of independent draws come out, within five standard deviations."""
    expected, deviation = probability * kept.numel(), math.sqrt(probability * (1 - probability) * kept.numel())
    return abs(kept.sum().item() - expected) < 5 * deviation


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """The pairs of a query and a key that it sees."""
    return mask[..., torch.ones(mask.shape[-2:], dtype=torch.bool).tril()].flatten()


def _all_of(masks: list[MicroBatch], kind: str) -> list[torch.Tensor]:
    """Every mask of a rank, flat, in the order in which they were drawn."""
    if kind == "hidden":
        return [mask.flatten() for micro_batch in masks for mask in micro_batch.hidden]
    return [_visible(mask) for micro_batch in masks for layer in micro_batch.attention for mask in layer]


@pytest.mark.parametrize(("kind", "dropped"), [("hidden", HIDDEN), ("attention", ATTENTION)])
def test_every_rank_call_and_micro_batch_drops_other_elements_at_the_rate_asked_for(
    recorded: RecordedRun, kind: str, dropped: float
) -> None:
    alike = dropped**2 + (1 - dropped) ** 2  # how often two independent draws agree
    for place in recorded.masks:
        ranks = [_all_of(masks, kind) for masks in place]
        assert len(ranks[0]) == ITERATIONS * MICRO_BATCHES * (1 + 2 * LAYERS if kind == "hidden" else 2 * LAYERS)
        for masks in ranks:
            assert _within_chance(torch.cat(masks), 1 - dropped)
            # One call to the next, one micro-batch to the next.
            for gap in (1, 2, len(masks) // (ITERATIONS * MICRO_BATCHES), len(masks) // ITERATIONS):
                pairs = [(a, b) for a, b in zip(masks, masks[gap:], strict=False) if len(a) == len(b)]
                assert not pairs or _within_chance(torch.cat([a == b for a, b in pairs]), alike)
        for a, b in itertools.combinations(ranks, 2):
            assert _within_chance(torch.cat(a) == torch.cat(b), alike)
        everything = [mask.numpy().tobytes() for masks in ranks for mask in masks]
        assert len(set(everything)) == len(everything)


def test_tensor_parallel_ranks_drop_the_same_hidden_elements_and_other_attention_weights(
    two_by_two: RecordedRun,
) -> None:
    """The hidden state is the same on all of them, and heads are not."""
    alike = ATTENTION**2 + (1 - ATTENTION) ** 2
    for one, other in zip(*two_by_two.masks, strict=True):
        assert all(map(torch.equal, _all_of(one, "hidden"), _all_of(other, "hidden")))
        pairs = zip(_all_of(one, "attention"), _all_of(other, "attention"), strict=True)
        assert _within_chance(torch.cat([a == b for a, b in pairs]), alike)


def test_after_each_step_the_ranks_of_a_context_parallel_group_share_their_random_state(
    recorded: RecordedRun,
) -> None:
    for place in recorded.states:
        assert all(states == place[0] for states in place)
        for name in ("default", "model-parallel-rng"):
            assert len({states[name] for states in place[0]}) == ITERATIONS == len(place[0])


def assert_identical(run: list[RankReport], reference: list[RankReport]) -> None:
    """To the bit, over the steps that both have (a resumed run has the last ones)."""
    for report, expected in zip(run, reference, strict=True):
        steps = len(report.grad_norms)
        assert steps and report.grad_norms == expected.grad_norms[-steps:]
        assert report.losses == expected.losses[-steps:] or not expected.losses
        assert report.parameters.keys() == expected.parameters.keys()
        for name, parameter in report.parameters.items():
            assert torch.equal(parameter, expected.parameters[name]), name


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            marks=pytest.mark.supports("Training", "dropout under full recompute", "the same without, to the bit"),
        ),
        pytest.param("--recompute-granularity selective", marks=pytest.mark.slow),
        pytest.param("--rerun-mode validate_results", marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_twice_drops_the_same_elements_twice(
    trainer: Trainer, four_ranks: RecordedRun, flags: str
) -> None:
    assert_identical(trainer.planned(f"{FLAGS} {cp(4)} {flags}", ranks=4), four_ranks.run)


@pytest.mark.slow
@pytest.mark.supports("Training", "dropout of a resumed run", "the uninterrupted one, to the bit")
@pytest.mark.supports("Training", "dropout of a run that is started again", "the first one, to the bit")
def test_a_run_started_again_and_one_resumed_are_identical(
    trainer: Trainer, four_ranks: RecordedRun, tmp_path: Path
) -> None:
    again = trainer.planned(f"{FLAGS} {cp(4)} --save {tmp_path} --save-interval 5", ranks=4)
    assert_identical(again, four_ranks.run)
    resumed = trainer.planned(f"{FLAGS} {cp(4)} --load {tmp_path} --ckpt-step 5", ranks=4)
    assert len(resumed[-1].losses) == 5
    assert_identical(resumed, four_ranks.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--data-parallel-random-init",
    ],
)
def test_a_resumed_run_is_identical_whatever_else_is_parallel(trainer: Trainer, tmp_path: Path, flags: str) -> None:
    """Stages of a pipeline draw different amounts; replicas may have states of their own."""
    flags = f"{FLAGS} {cp(2)} --global-batch-size 12 {flags}"
    whole = trainer.planned(f"{flags} --save {tmp_path} --save-interval 5", ranks=4)
    resumed = trainer.planned(f"{flags} --load {tmp_path} --ckpt-step 5", ranks=4)
    assert len(resumed[-1].losses) == 5
    assert_identical(resumed, whole)
