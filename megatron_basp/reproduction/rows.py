"""A row with all of its columns, and the document of `megatron-basp reproduce`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_basp.plan import BatchPlan
from megatron_basp.reproduction.cases import Case, Table
from megatron_basp.reproduction.measured import Measured, Point, emulated, on_gpus
from megatron_basp.reproduction.modelled import ModelledCase, model_cases, target_shares


@dataclass(frozen=True)
class Row:
    """modelled: on the row's cluster. emulated: measured, or why not. gpus: measured, where such a run is known."""

    case: Case
    modelled: ModelledCase
    emulated: Measured | str
    gpus: Measured | None

    @property
    def plan(self) -> BatchPlan:
        """BASP's, whose K the row shows; of a share of Ulysses' step K is N."""
        return self.modelled.plan

    @property
    def group_size(self) -> int:
        """The largest K of its waves."""
        return self.case.ranks if self.case.of == "ulysses" else max(self.plan.group_sizes)

    @cached_property
    def modelled_value(self) -> float | None:
        return self.modelled.value

    @property
    def notes(self) -> list[str]:
        """Of the paper's figure, of the modelled one, then of the measured ones."""
        case, notes = self.case, []
        if case.note:
            notes.append(case.note)
        if case.inconsistent:
            notes.append(f"† the paper contradicts itself: {case.inconsistent}")
        if case.fitted:
            notes.append("modelled: a constant was fitted to the paper's figure")
        notes += self.modelled.notes
        notes.append(f"emulated: {self.emulated if isinstance(self.emulated, str) else self.emulated.note}")
        if self.gpus is not None:
            notes.append(f"GPUs: {self.gpus.note}")
        return notes

    def as_document(self) -> dict[str, Any]:
        case = self.case
        return {
            "table": case.table,
            "model": case.model,
            "seq_length": case.seq_length,
            "micro_batch_size": case.micro_batch_size,
            "ranks": case.ranks,
            "group_size": self.group_size,
            "paper": list(case.paper) if isinstance(case.paper, tuple) else case.paper,
            "modelled": self.modelled_value,
            "measured": self.measured,
            "measured_on_gpus": self.gpus.value if self.gpus else None,
            "note": "; ".join(self.notes),
            "quantity": case.quantity,
            "of": case.of,
            "cluster": case.cluster,
            "waves": [{"rows": len(wave.rows), "group_size": wave.group_size} for wave in self.plan.waves],
            "paper_contradicts_itself": bool(case.inconsistent),
        }

    @property
    def measured(self) -> float | None:
        """On the emulated cluster."""
        return None if isinstance(self.emulated, str) else self.emulated.value


def rows(tables: Sequence[Table], on_emulated: Sequence[Point], on_real: Sequence[Point]) -> list[Row]:
    """All rows.

    Args:
        on_emulated, on_real: runs of `bench train` on the emulated cluster and on GPUs.

    Raises:
        ConfigurationError: a row has no plan, or its model or cluster is not known.
    """
    modelled = model_cases(tables)
    return [
        Row(
            case,
            modelled[case],
            emulated(case, modelled[case].copies_kv_heads, share, on_emulated),
            on_gpus(case, modelled[case].model, on_real),
        )
        for case, share in target_shares(modelled).items()
    ]
