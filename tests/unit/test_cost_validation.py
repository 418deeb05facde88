"""The cost model stays as near to published figures as docs/cost-model.md says, and misses where it says so."""

from __future__ import annotations

import pytest

from megatron_basp.cluster import ClusterSpec
from scripts.figures import published
from scripts.figures.cost_model import BEGIN, END, PAGE, page_with_tables
from scripts.figures.published import Group, Row, groups


@pytest.fixture(scope="module")
def found() -> list[Group]:
    return groups()


@pytest.fixture(scope="module")
def rows(found: list[Group]) -> list[Row]:
    return [row for group in found for row in group.rows]


def label(row: Row) -> str:
    return f"{row.group}: {row.name} ({row.deviation:+.1f}, bar {row.bar})"


def test_the_rows_that_miss_their_bar_are_exactly_those_with_a_reason(rows: list[Row]) -> None:
    """A change that mends a row or breaks one is noticed either way."""
    missing = {label(row) for row in rows if row.is_judged and not row.is_within}
    expected = {label(row) for row in rows if row.miss_expected}
    assert missing == expected


def test_what_was_fitted_fits_and_something_else_was_held(found: list[Group], rows: list[Row]) -> None:
    assert all(row.is_within and not row.miss_expected for row in rows if row.use == "fitted")
    for group in found:
        assert any(row.use == "held" for row in group.rows), group.title


def test_the_two_constants_fitted_to_the_paper_fit_it_to_a_hundredth(rows: list[Row]) -> None:
    fitted = [row for row in rows if row.kind.startswith("paper") and row.use == "fitted"]
    assert len(fitted) == 2
    assert all(row.deviation == pytest.approx(0, abs=1) for row in fitted), [label(row) for row in fitted]


@pytest.mark.parametrize(
    ("kind", "bar", "at_least"),
    [
        ("all_to_all", 10, 12),
        ("across_rate", 10, 5),
        ("flexsp_share", 5, 11),
        ("paper_share", 5, 1),
        ("paper_ratio", 10, 5),
        ("paper_speed_up", 5, 9),
        ("mfu", 10, 12),
        ("step", 10, 8),
        ("memory", 10, 10),
    ],
)
def test_no_bar_was_lowered_and_no_held_row_taken_away(rows: list[Row], kind: str, bar: float, at_least: int) -> None:
    of_kind = [row for row in rows if row.kind == kind]
    assert {row.bar for row in of_kind} == {bar}
    assert sum(row.use == "held" for row in of_kind) >= at_least


def test_every_row_that_is_not_judged_says_why(rows: list[Row]) -> None:
    for row in rows:
        assert bool(row.explanation) == (not row.is_judged or row.miss_expected), row.name


def test_a_row_outside_of_its_range_counts_from_the_nearer_end() -> None:
    row = Row("group", "paper_speed_up", "row", (1.0, 2.0), 2.1, 5, "held", "", False)
    assert row.deviation == pytest.approx(5)
    share = Row("group", "paper_share", "row", 0.30, 0.36, 5, "held", "", False)
    assert share.deviation == pytest.approx(6) and not share.is_within


def test_slower_links_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ClusterSpec.across_bytes_per_second
    monkeypatch.setattr(ClusterSpec, "across_bytes_per_second", lambda *args: 0.7 * honest(*args))
    changed = [row for group in published.groups() for row in group.rows if row.is_judged]
    assert {"paper_share", "paper_speed_up", "across_rate", "flexsp_share"} <= {
        row.kind for row in changed if not row.is_within and not row.miss_expected
    }


def test_the_page_shows_these_figures(found: list[Group]) -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert page == page_with_tables(page, found), "run `make cost-model`"
    assert PAGE.with_suffix(".png").stat().st_size > 10_000
