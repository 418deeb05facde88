"""Pages of which a part, between two marks, is made by a command."""

from __future__ import annotations


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """The page with `part` in place of what is between the marks, which stay."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{part}\n{end}{after}"
