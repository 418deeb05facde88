"""What lets an interrupted demo go on: Megatron's checkpoints, and beside them what each step gave until then.

FOLDER/training.json        the flags of all runs: others must not go on from their checkpoints
FOLDER/MODE/                Megatron's checkpoints
FOLDER/MODE/rank0.jsonl …   a line for each step of a rank
FOLDER/MODE.json            the result of a run that has ended
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_basp.atomic_files import read_json, write_json
from megatron_basp.errors import ConfigurationError


@dataclass(frozen=True)
class Step:
    """What one step gave on a rank; held_out_loss: of the evaluation before the first."""

    loss: float
    grad_norm: float
    seconds: float
    sent_bytes: int
    held_out_loss: float


@dataclass(frozen=True)
class Kept:
    """The files of one demo. interval: steps between checkpoints."""

    folder: Path
    interval: int

    def begin(self, training: dict[str, Any]) -> None:
        """Args: training: what must be the same to go on.

        Raises:
            ConfigurationError: the folder is of another training.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "training.json"
        earlier = read_json(file)
        if earlier is None:
            write_json(file, training)
        elif earlier != json.loads(json.dumps(training)):
            raise ConfigurationError(
                f"{self.folder} has checkpoints of other settings, or of another text: give the command that they are "
                f"of, use another --out, or remove the folder"
            )

    def flags(self, mode: str) -> list[str]:
        """Megatron's, to save and to go on."""
        folder = self.folder / mode
        saving = ["--save", str(folder), "--save-interval", str(self.interval), "--ckpt-format", "torch_dist"]
        return [*saving, "--load", str(folder)] if self.saved_step(mode) else saving

    def saved_step(self, mode: str) -> int:
        """Of the last whole checkpoint; 0 where there is none."""
        tracker = self.folder / mode / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def result(self, mode: str) -> dict[str, Any] | None:
        return read_json(self.folder / f"{mode}.json")

    def keep_result(self, mode: str, result: Any) -> None:
        write_json(self.folder / f"{mode}.json", asdict(result))

    def steps(self, mode: str, rank: int) -> StepLog:
        return StepLog(self.folder / mode / f"rank{rank}.jsonl", self.saved_step(mode))


class StepLog:
    """Steps of one rank on disk. Those behind the checkpoint are taken again, and dropped here."""

    def __init__(self, file: Path, saved_step: int) -> None:
        """Raises ConfigurationError: the file has fewer steps than the checkpoint."""
        lines = file.read_text().splitlines(keepends=True)[:saved_step] if saved_step and file.exists() else []
        if len(lines) < saved_step or any(not line.endswith("\n") for line in lines):
            raise ConfigurationError(f"{file} has not the {saved_step} steps of its checkpoint: remove {file.parent}")
        self.earlier = [Step(**json.loads(line)) for line in lines]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines))
        self._file = file

    def append(self, step: Step) -> None:
        with self._file.open("a") as stream:
            stream.write(json.dumps(asdict(step)) + "\n")
