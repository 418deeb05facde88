"""For all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: tests share a few cores with others, and what is tested here is never how long it takes.
settings.register_profile("megatron_basp", deadline=None)
settings.load_profile("megatron_basp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Seconds first: a mistake in a plan shows before a training run starts."""
    order = ["unit", "distributed", "end_to_end", "transformer_engine"]
    items.sort(key=lambda item: order.index(item.path.parent.name))
