"""Rotary embedding left to the exchange: as if q and k had been rotated before, in fp64, for waves of every kind."""

from dataclasses import dataclass

import pytest
import torch

from megatron_basp.batch import stream_positions
from megatron_basp.kernels import Rotary
from tests.distributed.small_attention import (
    LENGTH,
    RANKS,
    Case,
    basp_attention,
    full_attention,
    groups_of_all_ranks,
    relative_error,
    stream_of,
)

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-12
SCALE_OF_YARN = 1.3


@dataclass(frozen=True)
class Rotated:
    """columns: of each head that are rotated."""

    case: Case
    columns: int = 4
    interleaved: bool = False

    def angles(self):
        return torch.randn(LENGTH, self.columns // 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def tables(self, positions):
        """Cosine and sine, [tokens, columns], of each column and its partner."""
        angles = self.angles()[positions]
        angles = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat([angles, angles], dim=1)
        return SCALE_OF_YARN * angles.cos(), SCALE_OF_YARN * angles.sin()

    def rotate(self, x):
        """[S, B, heads, d], as the definition has it: pairs of columns are turned by an angle."""
        cos, sin = (table[:, None, None] for table in self.tables(torch.arange(LENGTH)))
        turned, passed = x[..., : self.columns], x[..., self.columns :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            partner = torch.stack([-b, a], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            partner = torch.cat([-b, a], dim=-1)
        return torch.cat([turned * cos + partner * sin, passed], dim=-1)


CASES = {
    "K=4": Rotated(Case(rows=1, head_size=4)),
    "K=2, grouped queries": Rotated(Case(rows=2, heads=8, kv_heads=4, head_size=4)),
    "K=4, 1 kv head": Rotated(Case(rows=1, kv_heads=1, head_size=4)),
    "K=2 and K=4, 2 kv heads": Rotated(Case(rows=3, heads=8, kv_heads=2, head_size=4)),
    "K=1 and K=2": Rotated(Case(rows=6, heads=8, kv_heads=4, head_size=4)),
    "K=1 and K=2, partly, neighbours": Rotated(Case(rows=6, head_size=7), interleaved=True),
    "K=4, partly, values wider": Rotated(Case(rows=1, head_size=5, value_size=6), columns=2),
}


def attended(rotated, rank, groups):
    plan, drawn = rotated.case.plan(), rotated.case.draw()
    *inputs, gradient = (stream_of(plan, rank, x) for x in drawn)
    inputs = [x.requires_grad_() for x in inputs]
    attention = basp_attention(plan, groups)
    tables = rotated.tables(stream_positions(plan, rank, torch.device("cpu")))
    attention.rotate_next(Rotary(*tables, interleaved=rotated.interleaved))
    output = attention(*inputs, None)
    gradients = torch.autograd.grad(output, inputs, gradient)
    return [x.detach() for x in (output, *gradients, attention(*inputs, None))]


@pytest.fixture(scope="module")
def by_rank(on_ranks):
    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {name: attended(rotated, rank, groups) for name, rotated in CASES.items()}

    return on_ranks(all_cases, RANKS)


def on_one_process(rotated):
    *inputs, gradient = rotated.case.draw()
    inputs = [x.requires_grad_() for x in inputs]
    query, key, value = inputs
    output = full_attention(rotated.rotate(query), rotated.rotate(key), value)
    gradients = torch.autograd.grad(output, inputs, gradient)
    return [x.detach() for x in (output, *gradients, full_attention(*inputs))]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_rotating_first_and_the_next_call_does_not_rotate(by_rank, name):
    rotated = CASES[name]
    plan, expected = rotated.case.plan(), on_one_process(rotated)
    assert relative_error(expected[0], expected[-1]) > 0.1, "rotation matters"
    for rank, found in enumerate(by_rank):
        for what, x, whole in zip(("output", "dq", "dk", "dv", "not rotated"), found[name], expected, strict=True):
            assert relative_error(x, stream_of(plan, rank, whole)) <= TOLERANCE, f"rank {rank}: {what}"
