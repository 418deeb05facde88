"""The table at the start of a run, and the plain Megatron flags that do the same."""

import pytest

from megatron_basp.exchange_cost import AttentionShape, ExchangeModel
from megatron_basp.megatron.report import print_plan
from megatron_basp.placement import Placement
from megatron_basp.plan import Limits, plan_batch
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.run_flags import plain_flags
from tests.costs import CLUSTER, with_across
from tests.settings import small_settings

ONE_HOST = dict.fromkeys(range(8), "a")
SLOW = with_across(bytes_per_second_per_nic=1e9)
CARRIED_BY = "K = 4: carrier pigeons"
TWO_HOSTS = {rank: "ab"[rank // 4] for rank in range(8)}


@pytest.fixture
def printed(capsys):
    """The table's text, with line breaks and borders turned to single spaces."""

    def print_it(settings, cp_groups=(tuple(range(8)),), domain_of_rank=ONE_HOST, communicator_bytes=None):
        groups = SequenceGroups("cp", 0, {4: "four", 8: "cp"}, "alone", created=10, transports={})
        print_plan(settings, cp_groups, domain_of_rank, groups, communicator_bytes, CARRIED_BY)
        words = (word.strip("│┃|─━┌┐└┘├┤┬┴┼╭╮╰╯╇╈┡┩┏┓") for word in capsys.readouterr().out.split())
        return " ".join(word for word in words if word)

    return print_it


@pytest.mark.parametrize(
    ("rows", "group_size", "flags"),
    [
        (8, None, "--context-parallel-size 1 --micro-batch-size 1"),
        (16, None, "--context-parallel-size 1 --micro-batch-size 2"),
        (2, None, "--context-parallel-size 4 --micro-batch-size 1 --cp-comm-type a2a"),
        (1, None, "--context-parallel-size 8 --micro-batch-size 1 --cp-comm-type a2a"),
        (3, 8, "--context-parallel-size 8 --micro-batch-size 3 --cp-comm-type a2a"),
        (8, 2, "--context-parallel-size 2 --micro-batch-size 2 --cp-comm-type a2a"),
        (3, None, None),
        (6, None, None),
    ],
)
def test_plain_flags_spread_the_same_sequences_where_one_group_size_serves_all(rows, group_size, flags):
    limits = Limits(8, 8, group_size)
    assert plain_flags(plan_batch((64,) * rows, 8, limits), limits) == flags


def test_plain_flags_say_where_stock_all_to_all_refuses_the_key_value_heads():
    limits = Limits(8, 2)
    flags = plain_flags(plan_batch((64,) * 2, 8, limits), limits)
    assert flags.startswith("--context-parallel-size 4 --micro-batch-size 1, but not by a2a") and "Hkv = 2" in flags


def test_two_sequences_share_four_ranks_each(printed):
    text = printed(small_settings(2))
    assert text.startswith("sequence parallelism by groups: basp")
    assert "context-parallel ranks N 8" in text
    assert f"the exchange is carried by {CARRIED_BY}" in text
    assert "samples an iteration 4 = B 2 · DP 1 · 2 micro-batches" in text
    assert "micro-batch B, training 2 sequences of S = 64 tokens" in text
    assert "tokens a rank T 16 = B·S/N" in text
    assert "sequences at K = 4: 2 g = 2 groups a CP group: ranks [0, 1, 2, 3], [4, 5, 6, 7]; each" in text
    assert "each inside one host" in text
    assert "--context-parallel-size 4 --micro-batch-size 1 --cp-comm-type a2a" in text
    assert "evaluation" not in text


def test_three_sequences_go_in_two_waves_that_no_plain_flags_do(printed):
    text = printed(small_settings(3))
    assert "tokens a rank T 24" in text
    assert "sequences at K = 4: 2 g = 2 groups" in text
    assert "sequences at K = 8: 1 g = 1 groups a CP group: ranks [0, 1, 2, 3, 4, 5, 6, 7]" in text
    assert "none: sequences get different numbers of ranks" in text
    assert "--context-parallel-size" not in text


def test_eight_sequences_need_no_exchange(printed):
    text = printed(small_settings(8))
    assert "tokens a rank T 64" in text
    assert "sequences at K = 1: 8 g = 8 groups a CP group: ranks [0], [1], [2], [3] and 4 more" in text
    assert "and 4 more; nothing is exchanged" in text
    assert "--context-parallel-size 1 --micro-batch-size 1" in text and "a2a" not in text


def test_groups_that_leave_a_host_are_counted(printed):
    text = printed(small_settings(3), domain_of_rank=TWO_HOSTS)
    assert "[0, 1, 2, 3], [4, 5, 6, 7]; each inside one host" in text
    assert "[0, 1, 2, 3, 4, 5, 6, 7]; 1 of 1 cross the border of a host" in text


def test_a_domain_that_the_user_named_is_called_by_its_size(printed):
    text = printed(small_settings(1, domain_devices=4), domain_of_rank=TWO_HOSTS)
    assert "1 of 1 cross the border of a domain of 4 devices" in text


def test_groups_of_every_context_parallel_group_are_shown(printed):
    strided = ((0, 2, 4, 6), (1, 3, 5, 7))
    text = printed(small_settings(2, ranks=4, data_parallel_size=2, global_batch_size=8), cp_groups=strided)
    assert "samples an iteration 8 = B 2 · DP 2 · 2 micro-batches" in text
    assert "sequences at K = 2: 2 g = 2 groups a CP group: ranks [0, 2], [4, 6], [1, 3], [5, 7]; each" in text


def test_evaluation_at_another_batch_size_has_a_section_of_its_own(printed):
    training, evaluation = printed(small_settings(2, eval_micro_batch_size=8)).split("micro-batch B, evaluation")
    assert "sequences at K = 4: 2" in training
    assert evaluation.startswith(" 8 sequences of S = 64 tokens") and "sequences at K = 1: 8" in evaluation


def test_process_groups_are_counted_and_gloo_takes_no_memory_of_a_device(printed):
    text = printed(small_settings(3))
    # Of K = 8 it is Megatron's own.
    assert "process groups made for this 10 in the world, this rank is in 2" in text
    assert "device memory of the exchange's communicators none: gloo connects through the host's memory" in text


def test_memory_of_communicators_on_a_device_is_told_in_whole_mebibytes(printed):
    text = printed(small_settings(3), communicator_bytes=300 * 2**20 + 4096)
    assert "device memory of the exchange's communicators 300 MiB on this rank, measured" in text


def test_parts_of_the_exchange_are_told_by_group_size_and_why(printed):
    line = "parts in which a rank's heads are exchanged"
    assert f"{line} 1 at K = 4, 1 at K = 8: without --basp-cluster" in printed(small_settings(3))
    forced = small_settings(2, overlap_chunks=2)
    assert f"{line} 2 at K = 4: as --basp-overlap-chunks says" in printed(forced)
    shape = AttentionShape(heads=32, kv_heads=32, query_head_size=64, value_head_size=64, element_bytes=2)
    two_nodes = ExchangeModel(SLOW, shape, Placement(((0, 0, 0, 0, 1, 1, 1, 1),)))
    chosen = small_settings(1, limits=Limits(32, 32), seq_length=1 << 17, exchange=two_nodes)
    assert f"{line} 4 at K = 8: the least seconds on round, modelled" in printed(chosen)
    assert f"{line} none: nothing is exchanged" in printed(small_settings(8))


def test_parts_are_chosen_by_training_and_for_other_group_sizes_by_evaluation():
    shape = AttentionShape(heads=32, kv_heads=32, query_head_size=64, value_head_size=64, element_bytes=2)
    exchange = ExchangeModel(CLUSTER, shape, Placement(((0, 0, 0, 0, 1, 1, 1, 1),)))

    def chunks(rows, evaluated):
        run = small_settings(
            rows, eval_micro_batch_size=evaluated, limits=Limits(32, 32), seq_length=1 << 15, exchange=exchange
        )
        return run.chunks

    one, three = chunks(1, 1), chunks(3, 3)
    assert one[8] != three[8]
    assert chunks(1, 3) == {4: three[4], 8: one[8]}
    assert chunks(3, 1) == three
