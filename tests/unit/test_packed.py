"""Packed rows: documents by row, positions in them, what a batch and a model may say of them, and the kernels."""

import argparse
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.batch import stream_positions
from megatron_basp.documents import Documents, documents_of_rows
from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron import core_attention
from megatron_basp.megatron.batches import stream_of_batch
from megatron_basp.megatron.model import StreamRotaryEmbedding
from megatron_basp.megatron.packed import (
    packed_rows,
    packing_as_one_process,
    positions_in_documents,
    reading_documents,
)
from megatron_basp.megatron.refusals import refuse_unsupported_packing
from megatron_basp.plan import Limits, PlanHolder, plan_batch
from megatron_basp.sdpa import CausalSDPA

LENGTHS = (8, 8, 8)
CUMULATIVE = [0, 3, 8, 16, 17, 18, 24]
BY_ROW = ((0, 3, 8), (0, 8), (0, 1, 2, 8))
PLAN = plan_batch(LENGTHS, 4, Limits(4, 4))


def runtime(packed=True, rank=0, is_active=True):
    holder = PlanHolder()
    holder.set(PLAN)
    settings = SimpleNamespace(packed=packed, seq_length=8)
    return SimpleNamespace(
        is_active=is_active,
        settings=settings,
        plan_holder=holder,
        groups=SimpleNamespace(cp_rank=rank),
        batches_taken=0,
    )


def stock_params(cumulative=CUMULATIVE, **others):
    """What Megatron's script hands to the model."""
    lengths = torch.tensor(cumulative, dtype=torch.int32)
    values = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "cu_seqlens_q_padded": None}
    return SimpleNamespace(**values | {"cu_seqlens_kv_padded": None} | others)


# Documents.


@st.composite
def rows_of_documents(draw):
    length = draw(st.integers(1, 9))
    ends = st.sets(st.integers(1, length)).map(lambda inside: tuple(sorted({0, length} | inside)))
    return tuple(draw(st.lists(ends, min_size=1, max_size=5)))


@given(rows_of_documents(), st.data())
def test_documents_of_rows_are_found_again_in_their_cumulative_lengths(by_row, data):
    length = by_row[0][-1]
    cumulative = [0] + [row * length + end for row, ends in enumerate(by_row) for end in ends[1:]]
    # A document without tokens is none.
    repeated = data.draw(st.lists(st.sampled_from(cumulative), max_size=3))
    documents = documents_of_rows(sorted(cumulative + repeated), (length,) * len(by_row))
    assert documents.by_row == by_row and documents.lengths == (length,) * len(by_row)
    assert documents.of_rows([len(by_row) - 1]) == (by_row[-1],)

    positions = positions_in_documents(torch.tensor(cumulative, dtype=torch.int32), documents.lengths)
    expected = [[i - max(end for end in ends if end <= i) for i in range(length)] for ends in by_row]
    assert positions.tolist() == expected


@pytest.mark.parametrize(
    ("cumulative", "what"),
    [
        ([0, 8, 16], "cover the micro-batch of 24 tokens"),
        ([3, 8, 16, 24], "cover the micro-batch of 24 tokens"),
        ([], "cover the micro-batch of 24 tokens"),
        ([0, 8, 7, 16, 24], "must not descend"),
        ([0, 8, 24], "none ends at token 16"),
        ([*range(0, 15), 24], r"none ends at token 16.*\[0, 1, .*11, …\]"),
    ],
)
def test_documents_that_do_not_cover_whole_rows_are_refused(cumulative, what):
    with pytest.raises(ValueError, match=what):
        documents_of_rows(cumulative, LENGTHS)


# Batches and models.


@pytest.mark.parametrize("rank", range(4))
def test_a_stream_knows_the_documents_of_the_micro_batch_and_its_own_positions_in_them(rank):
    rows = packed_rows(runtime(rank=rank), stock_params())
    assert rows.documents == Documents(BY_ROW)
    batch = {"tokens": torch.arange(24).view(3, 8), "labels": None}
    tokens = stream_of_batch(runtime(rank=rank), batch)["tokens"][0].tolist()
    position = {
        row * 8 + i: i - max(end for end in ends if end <= i) for row, ends in enumerate(BY_ROW) for i in range(8)
    }
    assert rows.positions.tolist() == [position[token] for token in tokens]
    assert (rows.qkv_format, rows.cp_group, rows.tokens_per_sample) == ("sbhd", None, None)


def test_rows_that_are_strung_together_give_the_same_stream_and_what_describes_documents_stays():
    described = {"cu_seqlens": torch.tensor([CUMULATIVE]), "max_seqlen": torch.tensor([8])}
    tokens = torch.arange(24)
    apart = stream_of_batch(runtime(), {"tokens": tokens.view(3, 8), **described})
    together = stream_of_batch(runtime(), {"tokens": tokens.view(1, 24), **described})
    assert torch.equal(apart["tokens"], together["tokens"]) and apart["tokens"].shape == (1, PLAN.tokens)
    assert apart["cu_seqlens"] is described["cu_seqlens"] and apart["max_seqlen"] is described["max_seqlen"]


def test_documents_of_a_batch_are_not_ignored_where_rows_are_not_packed():
    with pytest.raises(
        ValueError, match="the batch has cu_seqlens, which sequence parallelism by groups would ignore"
    ):
        stream_of_batch(runtime(packed=False), {"tokens": torch.zeros(3, 8), "cu_seqlens": torch.tensor([CUMULATIVE])})


@pytest.mark.parametrize("name", ["cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"])
def test_padding_between_documents_is_refused(name):
    same = torch.tensor(CUMULATIVE, dtype=torch.int32)
    assert packed_rows(runtime(), stock_params(**{name: same})).documents.by_row == BY_ROW
    with pytest.raises(ValueError, match=f"{name} other than cu_seqlens_q"):
        packed_rows(runtime(), stock_params(**{name: same + 1}))


def called_with(runtime, **arguments):
    """What the model's own forward pass gets."""
    forward = reading_documents(runtime, lambda self, tokens, packed_seq_params=None: (tokens, packed_seq_params))
    return forward("model", "tokens", **arguments)


def test_the_model_gets_packed_rows_in_place_of_megatrons_description():
    tokens, packed = called_with(runtime(), packed_seq_params=stock_params())
    assert tokens == "tokens" and packed.documents.by_row == BY_ROW
    assert called_with(runtime(packed=False)) == ("tokens", None)
    assert called_with(runtime(is_active=False), packed_seq_params="stock's") == ("tokens", "stock's")


def test_a_model_that_is_told_of_documents_or_not_against_what_the_flags_say_is_refused():
    with pytest.raises(ValueError, match="attention would mix documents"):
        called_with(runtime())
    with pytest.raises(ValueError, match="the data is not packed"):
        called_with(runtime(packed=False), packed_seq_params=stock_params())


class Table(torch.nn.Module):
    """Stands for Megatron's rotary table: the angles are the positions."""

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config):
        return len(transformer_input)

    def forward(self, length, cp_group):
        return torch.arange(length)


def test_rotary_positions_restart_in_each_document_and_only_for_the_batch_that_said_so():
    run = runtime(rank=1)
    run.groups.alone = None
    rotary, packed = StreamRotaryEmbedding(Table(), run), packed_rows(run, stock_params())
    stream = torch.zeros(PLAN.tokens, 1, 4)
    for _ in range(2):
        assert (
            rotary(rotary.get_rotary_seq_len(None, None, stream, None, packed)).tolist() == packed.positions.tolist()
        )
        whole_rows = rotary(rotary.get_rotary_seq_len(None, None, stream, None, None))
        assert torch.equal(whole_rows, stream_positions(PLAN, 1, stream.device))
    assert not torch.equal(whole_rows, packed.positions)


@pytest.mark.parametrize("is_active", [True, False])
def test_conversations_are_packed_as_without_context_parallelism(is_active):
    def original(self, dataset, config):
        self.config = config

    config, dataset = SimpleNamespace(context_parallel_size=4, sequence_length=8), SimpleNamespace()
    packing_as_one_process(runtime(is_active=is_active), original)(dataset, "lines", config=config)
    assert dataset.config.context_parallel_size == (1 if is_active else 4)
    assert (dataset.config.sequence_length, config.context_parallel_size) == (8, 4)


# Kernels.


def test_transformer_engine_gets_rows_strung_together_with_the_lengths_of_their_documents(monkeypatch):
    params = ModuleType("megatron.core.packed_seq_params")
    params.PackedSeqParams = lambda **fields: SimpleNamespace(**fields)
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", params)
    core_attention._thd_params.cache_clear()
    calls = []

    class Recording(torch.nn.Module):
        def __init__(self, **arguments):
            super().__init__()

        def forward(self, query, key, value, mask, **arguments):
            calls.append(arguments)
            assert mask is None and query.shape == (24, 4, 2) and key.shape == value.shape == (24, 2, 2)
            return query.flatten(1)

    causal = SimpleNamespace(name="causal")
    kernel = core_attention.make_te(Recording)(attn_mask_type=causal)
    query, key = torch.randn(8, 3, 4, 2), torch.randn(8, 3, 2, 2)
    output = kernel(query, key, key, documents=BY_ROW)
    assert torch.equal(output, query.flatten(2)), "the output is back in [S, rows, h·d]"
    (arguments,) = calls
    packed = arguments["packed_seq_params"]
    assert arguments["attn_mask_type"] is causal and packed.qkv_format == "thd"
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv and packed.cu_seqlens_q.dtype == torch.int32
    assert packed.cu_seqlens_q.tolist() == CUMULATIVE
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 8
    core_attention._thd_params.cache_clear()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 0.0, 2.0])], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 2])
def test_a_document_is_attended_to_as_if_it_were_alone(window, sinks):
    kernel = CausalSDPA(0.5, window)
    qkv = [torch.randn(8, 3, heads, 2, dtype=torch.float64) for heads in (4, 2, 2)]
    output = kernel(*qkv, documents=BY_ROW, softmax_offset=sinks)
    alone = kernel(*(x[2:8, 2:3] for x in qkv), softmax_offset=sinks)
    assert (output[2:8, 2:3] - alone).abs().max() <= 1e-14
    assert (output - kernel(*qkv, softmax_offset=sinks)).abs().max() > 1e-3


# Flags.


def packing(**given):
    flags = ("sft", "dataloader_inter_document_masking", "mtp_num_layers", "multi_latent_attention")
    stages = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    unset = dict.fromkeys((*flags, *stages, "pipeline_model_parallel_layout"))
    defaults = {"pipeline_model_parallel_size": 1, "moe_router_load_balancing_type": "aux_loss"}
    refuse_unsupported_packing(argparse.Namespace(**unset | defaults | given))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, "seq_aux_loss"),
    ],
)
@pytest.mark.parametrize("flag", ["sft", "dataloader_inter_document_masking"])
def test_features_that_packed_rows_do_not_go_with_are_refused(flag, given, named):
    packing(**given)
    with pytest.raises(ConfigurationError, match=f"--{flag.replace('_', '-')} with {named}"):
        packing(**given, **{flag: True})


@pytest.mark.parametrize(
    "given",
    [
        {"pipeline_model_parallel_size": 3},
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tL"},
    ],
)
def test_stages_that_get_no_documents_are_refused(given):
    packing(**given, sft=True)
    packing(pipeline_model_parallel_size=2, dataloader_inter_document_masking=True)
    with pytest.raises(ConfigurationError, match="more than 2 pipeline stages"):
        packing(**given, dataloader_inter_document_masking=True)
