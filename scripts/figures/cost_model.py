#!/usr/bin/env python
"""Write the tables of docs/cost-model.md anew, and draw docs/cost-model.png: the cost model beside published figures.

python -m scripts.figures.cost_model
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from scripts.figures.page import with_part
from scripts.figures.published import Group, Row, groups

PAGE = Path(__file__).parents[2] / "docs" / "cost-model.md"
BEGIN, END = "<!-- validation: made by `make cost-model` -->", "<!-- end of the validation -->"
STYLE = {
    "held": {"marker": "o", "color": "tab:blue"},
    "fitted": {"marker": "o", "markerfacecolor": "none", "color": "tab:orange"},
    "inconsistent": {"marker": "x", "color": "tab:grey"},
}


def main() -> None:
    found = groups()
    PAGE.write_text(page_with_tables(PAGE.read_text(), found))
    draw([row for group in found for row in group.rows], PAGE.with_suffix(".png"))


def page_with_tables(page: str, found: Sequence[Group]) -> str:
    """The page with today's tables in place of those between the marks."""
    return with_part(page, BEGIN, END, "\n\n".join([summary(found), misses(found), *map(table, found)]))


def summary(found: Sequence[Group]) -> str:
    rows = [row for group in found for row in group.rows]
    counts = {}
    for use in ("held", "fitted"):
        of_use = [row for row in rows if row.use == use]
        counts[use] = f"{sum(row.is_within for row in of_use)} of {len(of_use)}"
    return f"Within their bar: {counts['held']} held rows and {counts['fitted']} fitted ones."


def misses(found: Sequence[Group]) -> str:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for group in found:
        for row in group.rows:
            if row.is_judged and not row.is_within:
                of_reason = by_reason.setdefault((group.title, row.explanation), [])
                of_reason.append(f"{row.name} ({_deviation(row)})")
    lines = [f"- {title}: {'; '.join(rows)}. {_sentence(reason)}" for (title, reason), rows in by_reason.items()]
    return "\n".join(["Rows that miss, and why:", "", *lines])


def table(group: Group) -> str:
    bar = f"{group.bar} points" if group.rows[0].is_share else f"{group.bar} %"
    lines = [f"### {group.title}", "", f"{_sentence(group.source)} Bar: {bar}.", ""]
    lines += ["| | published | modelled | off by | use | verdict |", "|---|---|---|---|---|---|"]
    lines += [_line(row) for row in group.rows if row.use != "unusable"]
    reasons = {row.explanation: None for row in group.rows if row.use == "inconsistent"}
    notes = [f"Inconsistent: {_sentence(reason)}" for reason in reasons]
    notes += [f"Not usable: {row.name}: {_sentence(row.explanation)}" for row in group.rows if row.use == "unusable"]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)])


def _line(row: Row) -> str:
    verdict = "not judged" if not row.is_judged else "within" if row.is_within else "**misses**"
    ends = row.published if isinstance(row.published, tuple) else (row.published,)
    published = " to ".join(_figure(row, end) for end in ends)
    return f"| {row.name} | {published} | {_figure(row, row.modelled)} | {_deviation(row)} | {row.use} | {verdict} |"


def _figure(row: Row, value: float | None) -> str:
    assert value is not None
    if row.is_share:
        return f"{value:.1%}".replace("%", " %")
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _deviation(row: Row) -> str:
    if isinstance(row.published, tuple) and row.deviation == 0:
        return "inside"
    return f"{row.deviation:+.1f} {'points' if row.is_share else '%'}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def draw(rows: Sequence[Row], target: Path) -> None:
    pyplot.rcParams.update({"font.size": 9})
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 7.6), layout="constrained")
    panels = (
        ("all-to-all in a node, ms", ("all_to_all",), 1, "log"),
        ("arithmetic and whole steps, ms", ("arithmetic", "step"), 1, "log"),
        ("memory, GiB", ("memory",), 1, "linear"),
        ("shares of the all-to-all, %", ("flexsp_share", "paper_share"), 100, "linear"),
        ("model FLOPs utilization, %", ("mfu",), 1, "linear"),
        ("speed-up of the paper's steps", ("paper_speed_up",), 1, "linear"),
    )
    for ax, (title, kinds, unit, scale) in zip(axes.flat, panels, strict=True):
        _panel(ax, [row for row in rows if row.kind in kinds and row.use in STYLE], unit, scale)
        ax.set_title(title)
        ax.set_xlabel("published")
        ax.set_ylabel("modelled")
    handles = [pyplot.Line2D([], [], linestyle="none", label=use, **style) for use, style in STYLE.items()]
    axes.flat[0].legend(handles=handles, loc="upper left")
    figure.savefig(target, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _panel(ax: Axes, rows: Sequence[Row], unit: float, scale: str) -> None:
    ends = []
    for row in rows:
        assert row.published is not None and row.modelled is not None
        published = row.published if isinstance(row.published, tuple) else (row.published,)
        ends += [*published, row.modelled]
        span = [unit * end for end in published]
        ax.plot(span, [unit * row.modelled] * len(span), linestyle="-", linewidth=0.8, markersize=5, **STYLE[row.use])
    least, most = unit * min(ends), unit * max(ends)
    room = 1.2 if scale == "log" else 1.05
    line = [least / room + i * (most * room - least / room) / 200 for i in range(201)]
    bar = rows[0].bar
    off = [bar if rows[0].is_share else bar / 100 * value for value in line]
    lower = [value - d for value, d in zip(line, off, strict=True)]
    upper = [value + d for value, d in zip(line, off, strict=True)]
    ax.fill_between(line, lower, upper, color="tab:green", alpha=0.15, linewidth=0)
    ax.plot(line, line, color="tab:green", linewidth=0.8)
    ax.set_xscale(scale)
    ax.set_yscale(scale)
    ax.set_xlim(least / room, most * room)
    ax.set_ylim(least / room, most * room)


if __name__ == "__main__":
    main()
