"""More than one model, and more than one start of Megatron's parallelism, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_basp.batch import take_stream
from megatron_basp.errors import RankFailed
from megatron_basp.local_ranks import run_ranks
from megatron_basp.megatron.settings import Settings
from megatron_basp.plan import Limits
from tests.end_to_end.training import Trainer
from tests.settings import small_settings

RANKS, ROWS, LENGTH = 4, 3, 32
SETTINGS = small_settings(
    ROWS, ranks=RANKS, limits=Limits(heads=8, kv_heads=4), seq_length=LENGTH, global_batch_size=ROWS
)
HEADS = [(8, 4), (4, 1)]


def make_model(heads: int, kv_heads: int, ranks: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        context_parallel_size=ranks,
        attention_dropout=0,
        hidden_dropout=0,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=LENGTH, position_embedding_type="rope")


def batch() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(64, (ROWS, LENGTH), generator=generator)
    return [tokens, torch.arange(LENGTH).repeat(ROWS, 1)]


def installed() -> Any:
    from megatron_basp.megatron import hooks

    dist.init_process_group("gloo")
    return hooks.install()


def in_turn(rank: int, heads: list[tuple[int, int]]) -> float:
    """The largest difference of logits of several models, used in turn, from those of stock models on one rank."""
    from megatron.core import parallel_state

    runtime = installed()
    parallel_state.initialize_model_parallel()
    expected = [make_model(*each, ranks=1)(*batch(), None) for each in heads]
    parallel_state.destroy_model_parallel()

    runtime.set_settings(SETTINGS)
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    models = [make_model(*each, ranks=RANKS) for each in heads]
    plan = runtime.plan(ROWS, LENGTH)
    assert [wave.group_size for wave in plan.waves] == [2, 4]
    stream = [take_stream(plan, rank, each) for each in batch()]
    where = take_stream(plan, rank, torch.arange(ROWS * LENGTH).view(ROWS, LENGTH))
    difference = 0.0
    runtime.plan_holder.set(plan)
    for _ in range(2):
        for model, logits in zip(models, expected, strict=True):
            found = model(*stream, None)
            difference = max(difference, (found - logits.flatten(0, 1)[where]).abs().max().item())
    return difference


def test_two_models_with_different_heads_work_in_one_process(trainer: Trainer, tmp_path: Path) -> None:
    differences = run_ranks(lambda rank: in_turn(rank, HEADS), RANKS, tmp_path)
    assert max(differences) <= 1e-6


def test_a_model_whose_heads_do_not_fit_the_plan_is_refused_by_name(trainer: Trainer, tmp_path: Path) -> None:
    expected = (
        r"layer 1: H % K must be 0, .* got H=2, Hkv=2 per tensor-parallel rank and K=4: .* H=8, Hkv=4, for which"
    )
    with pytest.raises(RankFailed, match=expected):
        run_ranks(lambda rank: in_turn(rank, [(8, 4), (2, 2)]), RANKS, tmp_path)


def group_counts(rank: int, settings: Settings | None) -> list[int]:
    """Process groups after each of five starts and ends of Megatron's parallelism."""
    from megatron.core import parallel_state

    runtime = installed()
    runtime.set_settings(settings)
    counts = []
    for _ in range(5):
        parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
        if settings is not None:
            assert set(runtime.groups.by_size) == {2, 4}
        parallel_state.destroy_model_parallel()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_starting_again_leaves_no_process_group_behind(trainer: Trainer, tmp_path: Path) -> None:
    """No more than Megatron alone does: it destroys some of its own, and forgets the others."""
    ours = run_ranks(lambda rank: group_counts(rank, SETTINGS), RANKS, tmp_path)
    stock = run_ranks(lambda rank: group_counts(rank, None), RANKS, tmp_path)
    assert ours == stock
