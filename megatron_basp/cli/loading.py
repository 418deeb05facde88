"""Megatron in a command's own process, where it computes or only reads flags, on the CPU."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def load_megatron() -> None:
    """Import what takes seconds; GPUs are hidden from this process, and torch must not have looked for them before."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print("loading Megatron …", file=sys.stderr, flush=True)
    # What it warns of, missing GPU libraries, is what goes without here.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # while Python compiles it
    if "megatron.core" not in sys.modules:
        from megatron_basp import cpu

        cpu.install()
    logging.getLogger("megatron").setLevel(logging.WARNING)
