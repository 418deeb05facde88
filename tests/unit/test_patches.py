"""patches/: each only adds, right before the first import of Megatron, and comes off again."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[2] / "patches"
# Where `from gpt_builders import gpt_builder` stands, the first that imports Megatron, in the commits of the README.
FIRST_IMPORT = {"core_v0.18": 26, "core_v0.19": 26, "main": 39}


def stand_in(first_import: int) -> str:
    """What stands around the place in Megatron's script, at the same lines."""
    above = ["import os", *["#"] * (first_import - 4), "import torch", ""]
    below = ["from gpt_builders import gpt_builder", "from megatron.core import mpu", "#", 'print("trains")']
    return "\n".join([*above, *below, ""])


def apply(folder: Path, patch: str, *options: str) -> None:
    command = ["git", "apply", "--unidiff-zero", *options, str(PATCHES / f"{patch}.patch")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_is_a_patch_for_each_release_and_the_readme_names_its_commit() -> None:
    assert {path.stem for path in PATCHES.glob("*.patch")} == set(FIRST_IMPORT)
    readme = (PATCHES / "README.md").read_text()
    assert all(f"| `{name}.patch` |" in readme for name in FIRST_IMPORT)


@pytest.mark.parametrize("name", FIRST_IMPORT)
def test_hooks_are_in_before_the_first_import_of_megatron(name: str, tmp_path: Path) -> None:
    script, before = tmp_path / "pretrain_gpt.py", stand_in(FIRST_IMPORT[name])
    script.write_text(before)
    apply(tmp_path, name)
    body = ast.parse(script.read_text()).body
    order = [ast.unparse(node) for node in body]
    at = order.index("_megatron_basp_hooks.install()")
    assert order[at - 1] == "from megatron_basp.megatron import hooks as _megatron_basp_hooks"
    assert order[at + 1] == "from gpt_builders import gpt_builder" and order[at - 2] == "import torch"
    apply(tmp_path, name, "-R")
    assert script.read_text() == before


@pytest.mark.parametrize("name", FIRST_IMPORT)
def test_a_patch_only_adds_and_has_no_context(name: str) -> None:
    [_, _, hunk, *lines] = (PATCHES / f"{name}.patch").read_text().splitlines()
    place = FIRST_IMPORT[name]
    assert hunk == f"@@ -{place - 1},0 +{place},{len(lines)} @@"
    assert all(line.startswith("+") for line in lines)
