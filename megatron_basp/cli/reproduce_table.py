"""What `megatron-basp reproduce` prints for a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron_basp.reproduction.cases import Table
from megatron_basp.reproduction.loss import LossCurves
from megatron_basp.reproduction.report import COLUMNS, LEGEND, by_table, loss_line, sources, with_notes
from megatron_basp.reproduction.rows import Row

WIDTH = 138  # less would cut figures


def print_tables(rows: Sequence[Row], tables: Sequence[Table], losses: LossCurves | None, out: Path) -> None:
    console = Console(width=WIDTH, highlight=False)
    for table, of_table in by_table(rows, tables):
        lines, notes = with_notes(of_table)
        shown = RichTable(title=table.title, title_justify="left", box=box.SIMPLE, pad_edge=False)
        for column in COLUMNS:
            shown.add_column(column, justify="right" if column else "left", no_wrap=True)
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
        for note in notes:
            console.print(note, style="dim")
        console.print()
    console.print(f"Losses: {loss_line(losses)}")
    for source in sources(rows):
        console.print(source, style="dim", soft_wrap=True)
    console.print(f"\n{LEGEND}\nResults: {out / 'tables.md'}, with .csv, .png and result.json beside it", style="dim")
