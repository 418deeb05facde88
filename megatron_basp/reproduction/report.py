"""The rows as Markdown and CSV, and the cells that the terminal shows too."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from megatron_basp.reproduction.cases import Case, Figure, Table
from megatron_basp.reproduction.loss import LossCurves
from megatron_basp.reproduction.measured import Measured
from megatron_basp.reproduction.rows import Row

COLUMNS = ("", "S", "B", "N", "K", "paper", "modelled", "emulated", "GPUs", "notes")
SHARES = ("exchange_share", "step_time_cut")
EXCHANGES = {
    "paper": "DeepSpeed's exchange with a fitted wait, as the paper ran",
    "plugin": "this plugin's own exchange, with no wait",
}
LEGEND = (
    "paper: as published, read second-hand; † contradicts other figures of the paper. modelled: by the cost model, on "
    "the row's cluster. emulated: measured, a small Llama on two nodes of 4 ranks that are network namespaces, over a "
    "link on which Ulysses spends the row's share of its step in the exchange. GPUs: measured, the row's own model."
)


def label(case: Case) -> str:
    """The first cell: model, and what tells the row from its neighbours."""
    words = case.model
    if case.table == "beyond":
        words += f", {case.cluster}"
    if case.quantity == "exchange_share":
        words += f", {'Ulysses' if case.of == 'ulysses' else 'BASP'}"
    if case.quantity == "over_plain":
        words += ", over plain"
    return words


def cells(row: Row) -> list[str]:
    """All but the notes."""
    case = row.case
    waves = row.plan.waves
    sizes = str(row.group_size)
    if case.of == "basp" and len(waves) > 1:
        sizes = ", ".join(f"{len(wave.rows)} at {wave.group_size}" for wave in waves)
    paper = figure(case.paper, case)
    return [
        label(case),
        f"{case.seq_length:,}",
        str(case.micro_batch_size),
        str(case.ranks),
        sizes,
        f"{paper} †" if case.inconsistent else paper,
        figure(row.modelled_value, case),
        _measured(row.emulated, case),
        _measured(row.gpus, case),
    ]


def figure(value: Figure | None, case: Case) -> str:
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return " to ".join(figure(end, case) for end in value)
    if case.quantity in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.0f}×" if value >= 10 else f"{value:.2f}×"


def _measured(measured: Measured | str | None, case: Case) -> str:
    if measured is None or isinstance(measured, str):
        return "not measured"
    return figure(measured.value, case)


def with_notes(rows: Iterable[Row]) -> tuple[list[list[str]], list[str]]:
    """Cells with the numbers of their notes, and the notes, each once."""
    numbers: dict[str, int] = {}
    table = []
    for row in rows:
        # That nothing was measured stands in its column; where it could have been, there is no more to say.
        notes = [note for note in row.notes if note != "emulated: not measured"]
        table.append([*cells(row), " ".join(str(numbers.setdefault(note, len(numbers) + 1)) for note in notes)])
    return table, [f"{number}. {note[0].upper()}{note[1:]}." for note, number in numbers.items()]


def by_table(rows: Iterable[Row], tables: Sequence[Table]) -> list[tuple[Table, list[Row]]]:
    named = {table.name: table for table in tables}
    return [(named[name], list(group)) for name, group in groupby(rows, key=lambda row: row.case.table)]


def markdown(rows: Iterable[Row], tables: Sequence[Table], heading: str = "##") -> str:
    """All tables, each with its notes."""
    parts = []
    for table, of_table in by_table(rows, tables):
        lines, notes = with_notes(of_table)
        parts += [f"{heading} {table.title}", "", f"Modelled: {EXCHANGES[table.exchange]}.", ""]
        parts += [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *map(_line, lines), "", *notes, ""]
    return "\n".join(parts).rstrip()


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def sources(rows: Iterable[Row]) -> list[str]:
    """The runs that measured figures are from, a line each: date, machine, versions, command."""
    found = []
    for row in rows:
        for measured in (row.emulated, row.gpus):
            if isinstance(measured, Measured):
                document, machine = measured.point.document, measured.point.document["machine"]
                versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
                found.append(
                    f"- {document['date']}, {machine['device']}, {machine['cores']} cores, {versions}: "
                    f"`{document['command']}`"
                )
    return list(dict.fromkeys(found))


def loss_line(losses: LossCurves | None) -> str:
    if losses is None:
        return "Not measured."
    runs = ", ".join(losses.losses)
    return (
        f"{losses.steps} steps on real text, {runs}: the largest difference at any step is "
        f"{losses.largest_difference:.1e}. Made by `{losses.command}` ({losses.made_with})."
    )


def write_csv(rows: Iterable[Row], file: Path) -> None:
    documents = [row.as_document() for row in rows]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [key for key in documents[0] if key != "waves"], extrasaction="ignore")
        writer.writeheader()
        for document in documents:
            paper = document["paper"]
            writer.writerow({**document, "paper": " to ".join(map(str, paper)) if isinstance(paper, list) else paper})
