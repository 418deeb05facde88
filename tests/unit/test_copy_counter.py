"""What the counter of copies counts as one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_basp.copy_counter import CopyCounter

X, ORDER = torch.randn(6, 4), torch.tensor([1, 0, 2])
BYTES = 6 * 4 * 4


def counted(call: Callable[[], object]) -> int:
    with CopyCounter() as counter:
        call()
    return counter.copied_bytes


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.view(2, 12)[:1].transpose(0, 1),
        lambda: X.contiguous(),
        lambda: X.reshape(24).expand(3, 24).unflatten(1, (6, 4)),
        lambda: torch.empty_like(X),
        lambda: X.new_empty(9),
        lambda: X.detach(),
    ],
)
def test_views_and_allocations_move_nothing(call: Callable[[], object]) -> None:
    assert counted(call) == 0


@pytest.mark.parametrize(
    ("call", "passes"),
    [
        (lambda: X.clone(), 1),
        (lambda: X.t().contiguous(), 1),
        (lambda: X.t().reshape(24), 1),
        (lambda: torch.cat([X, X]), 2),
        (lambda: torch.stack([X, X]), 2),
        (lambda: torch.empty(6, 4).copy_(X), 1),
        (lambda: X.index_select(0, ORDER), 1 / 2),
        (lambda: torch.cat([X, X], out=torch.empty(12, 4)), 2),
        (lambda: torch.empty(6, 4).zero_(), 1),
        (lambda: X.repeat_interleave(3, 0), 3),
        (lambda: X.expand(5, 6, 4).contiguous(), 5),
        (lambda: X.double(), 2),
    ],
)
def test_a_pass_counts_with_the_bytes_that_it_writes(call: Callable[[], object], passes: float) -> None:
    assert counted(call) == BYTES * passes


def test_a_sum_counts_with_the_bytes_that_it_reads() -> None:
    assert counted(lambda: X.sum(0)) == BYTES


def test_what_backward_copies_is_counted_too() -> None:
    x, gradient = X.clone().requires_grad_(), torch.ones(4, 3)
    output = x[:3].t().contiguous()
    # A half to the places of a whole.
    assert counted(lambda: torch.autograd.grad(output, x, gradient)) == BYTES


def test_what_runs_paused_is_not_counted() -> None:
    with CopyCounter() as counter:
        with counter.paused():
            X.clone()
        X.clone()
    assert dict(counter.copied_bytes_by_operation) == {"aten::clone": BYTES}
