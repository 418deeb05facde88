"""The README claims what tests show, no more and no less."""

from __future__ import annotations

from tests.support_table import BEGIN, END, README, readme_with_table, supported


def test_the_table_in_the_readme_is_the_one_that_the_tests_make() -> None:
    readme = README.read_text()
    assert readme.count(BEGIN) == readme.count(END) == 1
    assert readme == readme_with_table(readme), "run `make support-table`"


def test_something_is_supported() -> None:
    assert len(supported()) > 20
