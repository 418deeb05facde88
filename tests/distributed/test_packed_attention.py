"""Packed rows over groups of ranks: a document is attended to as if it were alone, in fp64, wherever documents end."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_basp.documents import Documents, documents_of_rows
from tests.distributed.small_attention import (
    LENGTH,
    RANKS,
    Case,
    basp_attention,
    full_attention,
    groups_of_all_ranks,
    stream_of,
)

TOLERANCE = 1e-12
TENSORS = ("output", "query gradient", "key gradient", "value gradient")
HEADS = ((4, 4), (8, 4), (8, 2), (4, 1))


@dataclass(frozen=True)
class Packed:
    case: Case
    documents: Documents


@st.composite
def packed_cases(draw):
    rows = draw(st.integers(1, 6))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    ends = st.sets(st.integers(1, LENGTH - 1)).map(lambda inside: (0, *sorted(inside), LENGTH))
    by_row = draw(st.lists(ends, min_size=rows, max_size=rows))
    group_size = draw(st.sampled_from([None, RANKS]))
    return Packed(Case(rows, heads, kv_heads, group_size), Documents(tuple(by_row)))


def drawn(number):
    """The same cases on all ranks, drawn before these are started: ranks that disagree would wait for each other."""
    cases = []

    @settings(max_examples=number, derandomize=True, database=None, phases=[Phase.generate])
    @given(packed_cases())
    def collect(case):
        cases.append(case)

    collect()
    return cases


def by_document(documents, query, key, value):
    """Full attention over each document of each row, one after the other."""
    rows = []
    for row, ends in enumerate(documents.by_row):
        parts = [
            full_attention(*(x[start:stop, row : row + 1] for x in (query, key, value)))
            for start, stop in pairwise(ends)
        ]
        rows.append(torch.cat(parts))
    return torch.cat(rows, dim=1)


def errors(packed, rank, groups, told=None):
    """By tensor, how far this rank's part is from the definition. told: the documents that attention is given."""
    plan, (*qkv, gradient) = packed.case.plan(), packed.case.draw()
    whole = [x.clone().requires_grad_() for x in qkv]
    expected = by_document(packed.documents, *whole)
    expected = (expected, *torch.autograd.grad(expected, whole, gradient))

    attention = basp_attention(plan, groups)
    parts = [stream_of(plan, rank, x).requires_grad_() for x in qkv]
    output = attention(*parts, None, packed_seq_params=SimpleNamespace(documents=told or packed.documents))
    found = (output, *torch.autograd.grad(output, parts, stream_of(plan, rank, gradient)))
    return {
        name: error(x.detach(), stream_of(plan, rank, y.detach()))
        for name, x, y in zip(TENSORS, found, expected, strict=True)
    }


def error(found, expected):
    """The largest difference, relative to the largest entry, or to 1 where that is less: queries and keys of documents
    of one token have no gradient."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


WHOLE_ROWS = Documents(((0, LENGTH),) * 3)
TWO_EACH = Packed(Case(3, 8, 4), documents_of_rows([0, 3, 8, 13, 16, 18, 24], (LENGTH,) * 3))


@pytest.fixture(scope="module")
def measured(on_ranks):
    cases = drawn(60)

    def all_cases(rank):
        groups = groups_of_all_ranks()
        swapped = Documents(TWO_EACH.documents.by_row[::-1])
        return (
            [errors(packed, rank, groups) for packed in cases],
            errors(TWO_EACH, rank, groups, told=WHOLE_ROWS),
            errors(TWO_EACH, rank, groups, told=swapped),
        )

    return cases, *zip(*on_ranks(all_cases, RANKS), strict=True)


def test_attention_and_gradients_are_those_of_each_document_alone(measured):
    cases, by_rank, *_ = measured
    assert len({packed.case for packed in cases}) > 10
    assert any(len(ends) > 3 for packed in cases for ends in packed.documents.by_row)
    worst = max(max(found.values()) for of_rank in by_rank for found in of_rank)
    assert worst <= TOLERANCE


def test_documents_that_are_ignored_or_of_other_rows_show(measured):
    _, _, ignored, swapped = measured
    for of_ranks in (ignored, swapped):
        assert max(found["output"] for found in of_ranks) > 1e-3
