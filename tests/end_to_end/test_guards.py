"""What goes wrong in the field, done on purpose: each fault is refused, or makes the comparison with one rank fail."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_basp.errors import RankFailed
from tests.end_to_end.faults import gradient_of_one_kv_copy
from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_training

FLAGS = f"{GQA} {ROPE} --micro-batch-size 3 --global-batch-size 6"
PLANNED = f"{FLAGS} --context-parallel-size 4"


def leave_stock_attention_in() -> None:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    LocalSpecProvider.core_attention = lambda self: DotProductAttention


def without_guards() -> None:
    from megatron_basp.megatron import model, schedule

    model.check_model = schedule.check_model = lambda model: None
    schedule.check_exchanges = lambda *arguments: None


def test_stock_attention_in_a_planned_model_is_refused_when_it_is_built(trainer: Trainer) -> None:
    with pytest.raises(RankFailed, match=r"layers\.0\.self_attention\.core_attention is DotProductAttention"):
        trainer.planned(PLANNED, ranks=4, sabotage=leave_stock_attention_in)


def test_stock_attention_in_a_model_that_was_not_walked_is_refused_in_the_first_step(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron import model

        leave_stock_attention_in()
        model.check_model = lambda model: None

    with pytest.raises(RankFailed, match=r"layers\.0\.self_attention\.core_attention is DotProductAttention"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def test_attention_without_its_exchange_is_refused_in_the_first_step(trainer: Trainer) -> None:
    def sabotage() -> None:
        from types import SimpleNamespace

        from megatron_basp import overlap

        def keep(tensors: list[Any], where: Any, *others: Any) -> SimpleNamespace:
            own = [x[:, : max(1, x.shape[1] // where.size)].repeat(where.size, 1, 1) for x in tensors]
            return SimpleNamespace(arrived=lambda: own)

        overlap.start_to_heads = keep

    with pytest.raises(RankFailed, match=r"rank \d: layer 1 exchanged 0 times in groups of 2"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def test_a_module_that_may_mix_tokens_is_refused(trainer: Trainer) -> None:
    def sabotage() -> None:
        import torch
        from megatron.core.transformer.transformer_layer import TransformerLayer

        class Convolution(torch.nn.Module):
            pass

        plain = TransformerLayer.__init__

        def with_convolution(self: TransformerLayer, *args: object, **kwargs: object) -> None:
            plain(self, *args, **kwargs)
            self.convolution = Convolution()

        TransformerLayer.__init__ = with_convolution

    with pytest.raises(RankFailed, match=r"decoder\.layers\.0\.convolution is Convolution"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def stock_attention_and_no_guard() -> None:
    leave_stock_attention_in()
    without_guards()


def rows_of_another_group() -> None:
    from megatron_basp.megatron import batches

    take_stream = batches.take_stream
    batches.take_stream = lambda plan, rank, batch: take_stream(plan, rank, batch.flip(0) if rank >= 2 else batch)


def positions_of_the_rank_instead_of_the_sequence() -> None:
    from megatron_basp.megatron import model

    stream_positions = model.stream_positions
    model.stream_positions = lambda plan, rank, device: stream_positions(plan, 0, device)


def loss_averaged_by_rank() -> None:
    from megatron_basp.megatron import schedule

    schedule.with_rescaled_loss = lambda forward_step_func, runtime: forward_step_func


@pytest.mark.parametrize(
    "sabotage",
    [
        stock_attention_and_no_guard,
        rows_of_another_group,
        positions_of_the_rank_instead_of_the_sequence,
        loss_averaged_by_rank,
        gradient_of_one_kv_copy,
    ],
)
def test_the_comparison_with_one_rank_sees(trainer: Trainer, sabotage: Callable[[], None]) -> None:
    flags = FLAGS.replace("--num-query-groups 4", "--num-query-groups 2")
    run = trainer.planned(f"{flags} --context-parallel-size 4", ranks=4, mask="uneven", sabotage=sabotage)
    reference = trainer.stock(flags, mask="uneven")
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_training(run, reference)


def test_a_group_that_is_too_small_fails(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron import start_up

        create = start_up.create_sequence_groups

        def with_halved_groups(*arguments: object) -> object:
            groups = create(*arguments)
            by_size = {**groups.by_size, 4: groups.by_size[2]}
            return replace(groups, by_size=by_size, transports={**groups.transports, 4: groups.transports[2]})

        start_up.create_sequence_groups = with_halved_groups

    with pytest.raises(RankFailed, match=r"[Ss]plit"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def test_batches_that_the_script_slices_by_itself_are_refused_in_the_first_step(trainer: Trainer) -> None:
    """As by a script that imported the function before the hooks were in; for B=1 the slices have a stream's shape."""

    def sabotage() -> None:
        from megatron.core import utils

        utils.get_batch_on_this_cp_rank = utils.get_batch_on_this_cp_rank.__wrapped__

    flags = PLANNED.replace("--micro-batch-size 3 --global-batch-size 6", "--micro-batch-size 1 --global-batch-size 2")
    with pytest.raises(RankFailed, match="0 micro-batches were taken by the plan in the first step under it"):
        trainer.planned(flags, ranks=4, sabotage=sabotage)


def test_a_configuration_that_a_script_changed_is_refused(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron.training import argument_utils

        from_args = argument_utils.gpt_config_from_args

        def with_clipping(args: object) -> object:
            config = from_args(args)
            config.transformer.qk_clip = True
            return config

        argument_utils.gpt_config_from_args = with_clipping

    with pytest.raises(RankFailed, match=r"--qk-clip \(got True\) is not supported"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def test_hooks_go_in_once(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron import hooks

        hooks.install()

    with pytest.raises(RankFailed, match="the hooks are installed already"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def test_a_batch_of_another_shape_than_planned_is_refused(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron import pretrain_gpt

        get_batch = pretrain_gpt.get_batch

        def of_one_row_less(data_iterator: object, vp_stage: int | None = None) -> object:
            batch = {key: x if x is None else x[:2] for key, x in next(data_iterator).items()}  # type: ignore[call-overload]
            return get_batch(iter([batch]), vp_stage)

        pretrain_gpt.get_batch = of_one_row_less

    with pytest.raises(RankFailed, match=r"the plan is for a micro-batch of \[B, S\] = \[3, 64\], got \[2, 64\]"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def test_a_loss_function_of_two_values_is_refused(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron import pretrain_gpt

        pretrain_gpt.loss_func = lambda loss_mask, output, model=None: (output.mean(), {"lm loss": output.mean()})

    with pytest.raises(RankFailed, match="the loss function returned 2 values"):
        trainer.planned(PLANNED, ranks=4, sabotage=sabotage)


def rank_is(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


def test_ranks_that_were_started_with_different_plans_are_refused_before_groups_exist(trainer: Trainer) -> None:
    def sabotage() -> None:
        if rank_is(1):
            from megatron_basp.megatron import arguments

            settings = arguments._settings
            arguments._settings = lambda *args: replace(
                settings(*args), limits=replace(settings(*args).limits, group_size=2)
            )

    flags = f"{GQA} {ROPE} --micro-batch-size 2 --context-parallel-size 2"
    expected = r"different plans: rank 0 \(\w+\) \[basp; B=2 S=64 N=2: 2 at K=1\], rank 1 \(\w+\) \[basp.*2 at K=2\]"
    with pytest.raises(RankFailed, match=expected):
        trainer.planned(flags, ranks=2, sabotage=sabotage)


def test_a_plan_that_comes_to_differ_later_is_refused_in_its_step(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron.runtime import Runtime

        plan, calls = Runtime.plan, itertools.count()

        def other_plan(self: Runtime, micro_batch_size: int, seq_length: int) -> object:
            if next(calls) >= 9 and rank_is(1):
                return self.settings.plan(1, seq_length)
            return plan(self, micro_batch_size, seq_length)

        Runtime.plan = other_plan

    flags = f"{GQA} {ROPE} --micro-batch-size 2 --context-parallel-size 2 --basp-check"
    with pytest.raises(RankFailed, match=r"different plans: rank 0 .*B=2 .* rank 1 .*B=1 "):
        trainer.planned(flags, ranks=2, sabotage=sabotage)
