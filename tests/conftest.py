"""For all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: tests share a few cores with others, and what is tested here is never how long it takes.
settings.register_profile("megatron_basp", deadline=None)
settings.load_profile("megatron_basp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Seconds first: a mistake in a plan shows before a training run starts."""
    order = ["unit", "distributed", "versions", "end_to_end", "transformer_engine", "slurm"]
    items.sort(key=lambda item: order.index(item.path.parent.name))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron",
        type=Path,
        metavar="FOLDER",
        help="use the Megatron in this folder, not the installed one (see tests/versions)",
    )


def pytest_configure(config: pytest.Config) -> None:
    root = config.getoption("megatron")
    if root is not None:
        import megatron

        # It is a namespace package: what this Megatron lacks would come from the installed one.
        megatron.__path__ = [str(root.absolute() / "megatron")]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root.absolute()), os.environ.get("PYTHONPATH", "")])
