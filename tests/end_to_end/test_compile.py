"""`torch.compile` around BASP attention: it is left out, and the rest is compiled and computes the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_basp.local_ranks import run_ranks
from tests.end_to_end.test_lifetimes import LENGTH, RANKS, ROWS, SETTINGS, installed, make_model
from tests.end_to_end.training import Trainer

HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 8, 4, 8, 16


class Around(torch.nn.Module):
    """linear -> attention -> linear."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.before = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.attention = attention
        self.after = torch.nn.Linear(HEADS * HEAD_SIZE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = torch.nn.functional.silu(self.before(x)).unflatten(2, (-1, HEAD_SIZE))
        return self.after(self.attention(*qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2), None))


def output_and_gradients(model: Any, parameters: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), parameters)]


def compiled(rank: int) -> tuple[float, int, int]:
    """The largest difference from what is not compiled; how many graphs there were for how many plans."""
    from megatron.core import parallel_state

    # The CPU backend leaves it out, to start sooner.
    del os.environ["TORCHDYNAMO_DISABLE"]
    torch._dynamo.config.disable = False
    runtime = installed()
    runtime.set_settings(SETTINGS)
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    attention = make_model(HEADS, KV_HEADS, ranks=RANKS).decoder.layers[0].self_attention.core_attention
    around = Around(attention)
    parameters = list(around.parameters())
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = torch.compile(around, backend=backend)
    difference = 0.0
    batches = (ROWS, 1, 2)
    for rows in batches:
        plan = runtime.plan(rows, LENGTH)
        runtime.plan_holder.set(plan)
        x = torch.randn(plan.tokens, 1, WIDTH)
        for found, expected in zip(
            output_and_gradients(model, parameters, x), output_and_gradients(around, parameters, x), strict=True
        ):
            difference = max(difference, (found - expected).abs().max().item())
    return difference, len(graphs), len(batches)


@pytest.mark.slow
def test_what_is_around_attention_is_compiled_and_computes_the_same(trainer: Trainer, tmp_path: Path) -> None:
    for difference, graphs, plans in run_ranks(compiled, RANKS, tmp_path):
        assert difference <= 1e-6
        # What comes before and what comes behind; for T of the second plan anew, then for any T.
        assert 2 <= graphs <= 4 < 2 * plans
