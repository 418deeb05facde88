#!/usr/bin/env python
"""Write the tables of docs/results.md anew, and draw docs/results.png, from docs/results and the cost model.

python -m scripts.figures.results
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_basp.cli.reproduce import committed_losses, committed_rows
from megatron_basp.reproduction.cases import load_tables
from megatron_basp.reproduction.loss import LossCurves
from megatron_basp.reproduction.picture import draw
from megatron_basp.reproduction.report import loss_line, markdown, sources
from megatron_basp.reproduction.rows import Row
from scripts.figures.page import with_part

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
TABLES = "<!-- tables: made by `make results` -->", "<!-- end of the tables -->"
SOURCES = "<!-- runs: made by `make results` -->", "<!-- end of the runs -->"
LOSSES = "<!-- losses: made by `make results` -->", "<!-- end of the losses -->"


def main() -> None:
    found, losses = committed_rows(), committed_losses()
    PAGE.write_text(page_with_results(PAGE.read_text(), found, losses))
    draw(found, losses, PAGE.with_suffix(".png"))


def page_with_results(page: str, found: Sequence[Row], losses: LossCurves | None) -> str:
    """The page with today's figures in place of those between the marks."""
    runs = sources(found) or ["None: no measured column is filled yet."]
    page = with_part(page, *SOURCES, "\n".join(runs))
    page = with_part(page, *LOSSES, loss_line(losses))
    return with_part(page, *TABLES, markdown(found, load_tables(), heading="###"))


if __name__ == "__main__":
    main()
