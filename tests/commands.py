"""What commands say of bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_basp.cli.main import main


def assert_refused(
    command: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It exits with 2, says one line that matches, and writes nothing into the empty folder that it is called in."""
    monkeypatch.chdir(folder)
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert re.search(message, said.err), said.err
    assert list(folder.iterdir()) == []
