"""The contract with Megatron: what is hooked is there, and what is refused exists, by the name that we know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_basp.local_ranks import run_ranks


def broken_promises(rank: int) -> list[str]:
    """One line for each target that is not as its hook expects, and for each argument that a refusal names in vain.

    Needs a process that has not imported Megatron.
    """
    from megatron_basp import cpu
    from megatron_basp.megatron import on_cpu, recorder, seam
    from megatron_basp.megatron.versions import MegatronMismatch, check_version

    lines: list[str] = []

    def noting(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except MegatronMismatch as error:
                lines.append(str(error))

        return call

    # These two call `replace` themselves; a run would stop at the first target that is missing.
    check = on_cpu.replace = recorder.replace = noting(seam.replace)
    cpu.install()
    noting(check_version)()
    recorder.record_training()
    from megatron_basp.megatron.hooks import HOOKS

    for hook in HOOKS:
        check(hook.target, hook.parameters, lambda original: original, hook.also_in, hook.versions)
    return lines + wrong_refusals()


def wrong_refusals() -> list[str]:
    from megatron.training.arguments import parse_args

    from megatron_basp.megatron.refusals import REFUSALS, REFUSED_WITH
    from megatron_basp.megatron.versions import megatron_minor, megatron_version

    sys.argv = ["pretrain_gpt"]
    args, minor = parse_args(), megatron_minor()
    lines = []
    for refusal in (*REFUSALS, *REFUSED_WITH.get(minor, ())):
        expected = refusal.versions is None or minor in refusal.versions
        if hasattr(args, refusal.name) != expected:
            lines.append(
                f"megatron_basp refuses {refusal.name}, and Megatron-Core {megatron_version()} has "
                f"{'no' if expected else 'an'} argument of this name: see `versions` in refusals.py"
            )
    return lines


def test_every_hook_finds_its_target_and_every_refusal_its_argument(tmp_path: Path) -> None:
    assert "megatron.core" not in sys.modules, "this test needs a process in which Megatron was not imported"
    [lines] = run_ranks(broken_promises, 1, tmp_path)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)
