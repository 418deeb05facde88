"""Megatron is imported once, on the CPU backend; every training run is forked from that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.training import Trainer


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Runs real `pretrain()` on a few hundred kilobytes of real text: Python's standard library."""
    return make_trainer(tmp_path_factory.mktemp("training"))


def make_trainer(folder: Path) -> Trainer:
    """Imports Megatron on the CPU backend, and prepares the data that all runs share."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_basp import cpu

    cpu.install()
    from megatron_basp.megatron import pretrain_gpt  # noqa: F401
    from megatron_basp.megatron.text_dataset import prepare_sample_dataset

    dataset = prepare_sample_dataset(folder)
    return Trainer([*dataset.megatron_flags(), "--data-cache-path", str(folder / "cache")], folder)
