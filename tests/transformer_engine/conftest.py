"""Transformer Engine's own Python on the CPU: `make test-te` builds the environment for it and runs these tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import over_gloo
from tests.end_to_end.conftest import make_trainer
from tests.end_to_end.training import Trainer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("transformer_engine") is None
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.transformer_engine)
            if missing:
                item.add_marker(pytest.mark.skip(reason="Transformer Engine is not installed: make test-te"))


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """As in tests/end_to_end, with Transformer Engine there when Megatron is imported."""
    from tests.transformer_engine import kernels

    kernels.install()
    trainer = make_trainer(tmp_path_factory.mktemp("training"))
    kernels.use_unfused_attention()
    return trainer


@pytest.fixture(scope="session")
def on_ranks(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Call a function of the rank on so many ranks that talk over gloo; gives what each returned."""
    return over_gloo(tmp_path_factory)
