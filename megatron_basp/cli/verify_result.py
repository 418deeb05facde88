"""What `megatron-basp verify` found: for a file, for a script, for a person."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_basp.comparison import BOUNDS, Bounds, Comparison, Difference

# Users' models have more heads and experts than the tests', so that sums are longer; mistakes begin at 1e-3.
ROUNDING = Bounds(*(5 * bound for bound in BOUNDS))


@dataclass
class Case:
    """One run that is held to the reference.

    comparison: None where the run failed, as `failure` says.
    """

    name: str
    group_sizes: list[int]
    comparison: Comparison | None
    failure: str = ""


@dataclass
class VerifyResult:
    """All of it; cases that did not run yet are missing."""

    flags: list[str]
    ranks: int
    device: str
    changes: list[str]
    versions: dict[str, str]
    bounds: Bounds = ROUNDING
    cases: list[Case] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    is_finished: bool = False

    def beyond_rounding(self, case: Case) -> list[str]:
        if case.comparison is None:
            return [f"the run failed: {case.failure}"]
        found = case.comparison.beyond(self.bounds)
        return found if case.comparison.samples_equal else [*found, "steps were trained on other samples"]

    @property
    def is_equal(self) -> bool:
        return self.is_finished and not any(map(self.beyond_rounding, self.cases))

    def as_document(self) -> dict[str, Any]:
        verdict = "equal" if self.is_equal else "different" if self.is_finished else "unfinished"
        return {
            "verdict": verdict,
            "cases": [self._case_document(case) for case in self.cases],
            "left_out": [{"name": name, "why": why} for name, why in self.left_out.items()],
            "bounds": {
                "max_loss_difference": self.bounds.loss,
                "max_gradient_relative_difference": self.bounds.gradient,
                "max_parameter_difference": self.bounds.parameter,
            },
            "changes": self.changes,
            "flags": self.flags,
            "ranks": self.ranks,
            "device": self.device,
            "versions": self.versions,
        }

    def _case_document(self, case: Case) -> dict[str, Any]:
        found = case.comparison
        return {
            "name": case.name,
            "max_loss_difference": found and _for_json(found.losses),
            "max_gradient_relative_difference": found and _for_json(found.gradients),
            "max_parameter_difference": found and _for_json(found.parameters),
            "samples_equal": found is not None and found.samples_equal,
            "beyond_rounding": self.beyond_rounding(case),
            "group_sizes": case.group_sizes,
        }


def _for_json(difference: Difference | None) -> float | None:
    """JSON has no infinity."""
    return difference.value if difference is not None and math.isfinite(difference.value) else None


def print_verdict(result: VerifyResult, out: Path) -> None:
    """The table, what differs, and the verdict."""
    table = Table(
        title="largest differences from stock without context parallelism",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for name in ("", "loss", "gradient", "parameter", "samples", "K", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for case in result.cases:
        found = case.comparison
        figures = (
            [f"{d.value:.1e}" for d in (found.losses, found.gradients, found.parameters) if d] if found else ["-"] * 3
        )
        table.add_row(
            case.name,
            *figures,
            "-" if found is None else "equal" if found.samples_equal else "DIFFERENT",
            ", ".join(map(str, case.group_sizes)),
            "different" if result.beyond_rounding(case) else "equal",
        )
    table.add_section()
    table.add_row("bound", *(f"{bound:.1e}" for bound in result.bounds))
    console = Console()
    console.print(table)
    for case in result.cases:
        for line in result.beyond_rounding(case):
            console.print(f"{case.name}: {line}", highlight=False)
    for name, why in result.left_out.items():
        console.print(f"{name}: not run, {why}", highlight=False)
    console.print(
        f"\nverdict: [bold]{'equal' if result.is_equal else 'different'}[/bold]. loss: absolute, over all steps. "
        f"gradient, parameter: of each tensor, relative in the Frobenius norm. {result.ranks} ranks on {result.device}"
        f"; {out / 'result.json'}, {out / 'logs'}",
        highlight=False,
    )
