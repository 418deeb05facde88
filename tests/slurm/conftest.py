"""One SLURM for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder: Path = tmp_path_factory.mktemp("slurm")
    with slurm(folder) as started:
        yield started
