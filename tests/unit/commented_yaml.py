"""Which figures of a hardware file stand beside no comment."""

from __future__ import annotations


def without_a_comment(text: str) -> list[str]:
    """The lines that hold a figure and neither end in a comment nor follow one directly."""
    bare, previous = [], ""
    for line in text.splitlines():
        content = line.split("#")[0].strip()
        has_figure = bool(content) and not content.endswith(":")
        if has_figure and "#" not in line and not previous.lstrip().startswith("#"):
            bare.append(line)
        previous = line
    return bare
