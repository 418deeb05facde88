"""Pieces that need no exchange, without process groups. (With them: tests/distributed/test_chunks.py)"""

import pytest
import torch

from megatron_basp.overlap import Piece, attend
from megatron_basp.plan import Limits, plan_batch


@pytest.mark.parametrize("wanted", [True, False])
def test_kernels_record_a_graph_only_where_a_gradient_is_wanted_learnt_sinks_or_not(wanted):
    """A parameter says that it requires one even where nobody will ask for it, as at evaluation."""
    recorded = []

    def kernel(query, key, value, softmax_offset):
        output = (query * softmax_offset[:, None] + key + value).flatten(2)
        recorded.append((query.requires_grad, output.grad_fn is not None))
        return output

    (share,) = plan_batch((8, 8), 2, Limits(2, 2)).shares(0)
    sinks = torch.nn.Parameter(torch.ones(2))
    with torch.set_grad_enabled(wanted):
        output = attend(
            [Piece(share, slice(0, 8), None, 0, 1)], [kernel], *(torch.ones(8, 2, 4) for _ in range(3)), sinks
        )
    assert recorded == [(wanted, wanted)]
    assert output.requires_grad == wanted
    if wanted:
        output.sum().backward()
        assert torch.equal(sinks.grad, torch.full((2,), 32.0))
