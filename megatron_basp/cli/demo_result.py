"""What `megatron-basp demo` found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ModeResult:
    """What one run gave.

    step_seconds: median of the steps after the first.
    bytes_sent_per_rank_per_step: by the ledger, in the exchanges of attention.
    group_sizes: K of each wave.
    """

    losses: list[float]
    grad_norms: list[float]
    step_seconds: float
    bytes_sent_per_rank_per_step: int
    group_sizes: list[int]
    held_out_loss_before: float
    held_out_loss_after: float


@dataclass
class DemoResult:
    """All of it: `OUT/result.json`, and the document of --json. Modes that did not run are missing."""

    settings: dict[str, Any]
    plan: list[dict[str, int]]
    modes: dict[str, ModeResult] = field(default_factory=dict)

    def difference(self, mode: str) -> float:
        """The largest difference of a step's loss from the reference's."""
        pairs = zip(self.modes[mode].losses, self.modes["reference"].losses, strict=True)
        return max(abs(a - b) for a, b in pairs)

    def as_document(self) -> dict[str, Any]:
        document = {"settings": self.settings, "plan": self.plan}
        document |= {mode: asdict(result) for mode, result in self.modes.items()}
        compared = [mode for mode in self.modes if mode != "reference"]
        if compared:
            document["max_loss_difference"] = max(self.difference(mode) for mode in compared)
        return document
