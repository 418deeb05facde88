"""The settings of a small run, for tests that need some."""

from __future__ import annotations

from typing import Any

from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.megatron.settings import Settings
from megatron_basp.plan import Limits


def small_settings(micro_batch_size: int = 1, **changes: Any) -> Settings:
    """8 context-parallel ranks, sequences of 64 tokens, 8 heads, but for what is given."""
    values: dict[str, Any] = {
        "mode": "basp",
        "ranks": 8,
        "limits": Limits(8, 8),
        "seq_length": 64,
        "micro_batch_size": micro_batch_size,
        "eval_micro_batch_size": micro_batch_size,
        "global_batch_size": 2 * micro_batch_size,
        "data_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "domain_devices": None,
        "attention": AttentionShape(8, 8, 8, 8, 4),
        "exchange": None,
        "per_token_loss": False,
        "packed": False,
        "sft": False,
        "ledger": None,
        "check": False,
        "overlap_chunks": None,
        "transport": "nccl",
    }
    return Settings(**values | changes)
