"""The README's table of what is supported, made of the tests that show it: it can't claim more than is tested.

    python -m tests.support_table        # writes README.md anew

A test says what it shows with `@pytest.mark.supports(area, feature, held_to)`, on its function or on one of its
parameter sets; held_to names what the run is compared with.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.figures.page import with_part

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- support table: made by `make support-table` -->", "<!-- end of the support table -->"
FOLDERS = ("distributed", "end_to_end")  # what `make test` and `make test-all` run
AREAS = ("Parallelism", "Models", "Experts", "Data and loss", "Training", "Checkpoints")


class Support(NamedTuple):
    area: str
    feature: str
    held_to: str = "one process"


def supported() -> list[Support]:
    """Every feature that a test shows, by area, in the order of the tests; each once for each thing it is held to."""
    found = dict.fromkeys(_marked())
    unknown = {support.area for support in found} - set(AREAS)
    assert not unknown, f"areas that the table does not know: {unknown}"
    return sorted(found, key=lambda support: AREAS.index(support.area))


def _marked() -> Iterator[Support]:
    for file in sorted(file for folder in FOLDERS for file in (Path(__file__).parent / folder).glob("test_*.py")):
        module = importlib.import_module(f"tests.{file.parent.name}.{file.stem}")
        for function in filter(inspect.isfunction, vars(module).values()):
            marks = list(getattr(function, "pytestmark", ()))
            for mark in [mark for mark in marks if mark.name == "parametrize"]:
                marks += [inner for case in mark.args[1] for inner in getattr(case, "marks", ())]
            yield from (Support(*mark.args, **mark.kwargs) for mark in marks if mark.name == "supports")


def table() -> str:
    """The table in Markdown: a row for each area and each thing that its features are held to."""
    rows: dict[tuple[str, str], list[str]] = {}
    for support in supported():
        rows.setdefault((support.area, support.held_to), []).append(support.feature)
    lines = ["| | exact, by a test | held to |", "|---|---|---|"]
    lines += [f"| {area} | {'<br>'.join(features)} | {held_to} |" for (area, held_to), features in rows.items()]
    return "\n".join(lines)


def readme_with_table(readme: str) -> str:
    """The README with today's table in place of the one between the marks."""
    return with_part(readme, BEGIN, END, table())


if __name__ == "__main__":
    README.write_text(readme_with_table(README.read_text()))
