"""What an interrupted demo goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_basp.cli.demo_kept import Kept, Step
from megatron_basp.errors import ConfigurationError


def step(number: int) -> Step:
    return Step(loss=8 - number / 10, grad_norm=1.0, seconds=0.2, sent_bytes=7, held_out_loss=8.5)


def saved(kept: Kept, mode: str, at: int) -> None:
    folder = kept.folder / mode
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(at))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "checkpoints", 5)


def test_a_run_without_a_checkpoint_starts_anew(kept: Kept) -> None:
    log = kept.steps("basp", 0)
    assert log.earlier == [] and kept.saved_step("basp") == 0
    log.append(step(1))
    assert kept.steps("basp", 0).earlier == []
    assert "--load" not in kept.flags("basp") and "--save" in kept.flags("basp")


def test_steps_behind_the_checkpoint_are_dropped_and_the_others_come_back(kept: Kept) -> None:
    log = kept.steps("basp", 0)
    for number in range(1, 8):
        log.append(step(number))
    saved(kept, "basp", 5)
    again = kept.steps("basp", 0)
    assert again.earlier == [step(number) for number in range(1, 6)]
    again.append(step(6))
    lines = (kept.folder / "basp" / "rank0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(step(number)) for number in range(1, 7)]
    assert kept.flags("basp")[-2:] == ["--load", str(kept.folder / "basp")]


@pytest.mark.parametrize("text", ["", '{"loss": 1}\n', '{}\n{}\n{"lo'])
def test_a_log_that_lacks_steps_of_its_checkpoint_is_refused(text: str, kept: Kept) -> None:
    saved(kept, "basp", 3)
    (kept.folder / "basp" / "rank0.jsonl").write_text(text)
    with pytest.raises(ConfigurationError, match="has not the 3 steps of its checkpoint: remove"):
        kept.steps("basp", 0)


def test_checkpoints_of_other_settings_are_refused(kept: Kept) -> None:
    kept.begin({"flags": ["--lr", "1"], "ranks": 4})
    kept.begin({"flags": ["--lr", "1"], "ranks": 4})
    with pytest.raises(ConfigurationError, match="other settings, or of another text"):
        kept.begin({"flags": ["--lr", "2"], "ranks": 4})


def test_a_result_is_kept(kept: Kept) -> None:
    kept.begin({})
    assert kept.result("basp") is None
    kept.keep_result("basp", step(1))
    assert kept.result("basp") == asdict(step(1))
