"""Losses of the demo's runs, step by step, as a small CSV that says which command made it. Pure.

Two comment lines come first, the command and what it ran with; then step, a column for each run, and the largest
difference between any two of them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_basp.errors import ConfigurationError

STEP, DIFFERENCE = "step", "largest_difference"


@dataclass(frozen=True)
class LossCurves:
    """command: that makes them again. made_with: date, versions, text. losses: by run, one a step."""

    command: str
    made_with: str
    losses: Mapping[str, Sequence[float]]

    @property
    def differences(self) -> list[float]:
        """At each step, the largest between any two runs."""
        return [max(at_step) - min(at_step) for at_step in zip(*self.losses.values(), strict=True)]

    @property
    def steps(self) -> int:
        return len(self.differences)

    @property
    def largest_difference(self) -> float:
        return max(self.differences)


def write_losses(curves: LossCurves, file: Path) -> None:
    with file.open("w", newline="") as stream:
        stream.write(f"# {curves.command}\n# {curves.made_with}\n")
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([STEP, *curves.losses, DIFFERENCE])
        steps = zip(*curves.losses.values(), strict=True)
        for step, (at_step, difference) in enumerate(zip(steps, curves.differences, strict=True), start=1):
            # Nine digits tell any two fp32 losses apart.
            writer.writerow([step, *(f"{loss:.9g}" for loss in at_step), f"{difference:.3g}"])


def read_losses(file: Path) -> LossCurves:
    """Raises ConfigurationError: the file is not one that `write_losses` wrote."""
    lines = file.read_text().splitlines()
    try:
        (command, made_with), rows = lines[:2], list(csv.reader(lines[2:]))
        columns = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
        steps, _ = columns.pop(STEP), columns.pop(DIFFERENCE)
        losses = {name: [float(loss) for loss in column] for name, column in columns.items()}
    except (ValueError, IndexError, KeyError):
        raise ConfigurationError(f"{file} is no table of losses that `megatron-basp demo` writes") from None
    if not losses or list(steps) != [str(step) for step in range(1, len(steps) + 1)]:
        raise ConfigurationError(f"{file}: its steps must be 1, 2, 3 and on")
    return LossCurves(command.removeprefix("# "), made_with.removeprefix("# "), losses)
