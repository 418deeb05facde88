"""Run a Megatron training script, unmodified, with the sequence-parallel modes registered.

    torchrun --nproc-per-node 8 -m megatron_basp.launch pretrain_gpt.py --sequence-parallel-mode basp \\
        --context-parallel-size 8 --micro-batch-size 2 …
    torchrun --nproc-per-node 8 -m megatron_basp.launch --config configs/train/llama3.1-8b-16k.yaml pretrain_gpt.py …
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from megatron_basp.errors import ConfigurationError

EXAMPLES = """
examples:
  # 8 GPUs, 2 sequences a micro-batch: each gets 4 ranks
  torchrun --nproc-per-node 8 -m megatron_basp.launch Megatron-LM/pretrain_gpt.py \\
      --sequence-parallel-mode basp --context-parallel-size 8 --micro-batch-size 2 [Megatron's flags]

  # 4 CPU ranks, with the small script that comes with megatron_basp
  torchrun --nproc-per-node 4 -m megatron_basp.launch --cpu -m megatron_basp.megatron.pretrain_gpt \\
      --sequence-parallel-mode basp --context-parallel-size 4 --micro-batch-size 2 [Megatron's flags]

  # flags from YAML files, of which a later one wins, and the command line over all; the resolved command is printed
  torchrun --nproc-per-node 8 -m megatron_basp.launch --config configs/train/llama3.1-8b-16k.yaml \\
      --config data.yaml Megatron-LM/pretrain_gpt.py --train-iters 1000

The flags themselves are explained by SCRIPT --help, in the group "sequence parallelism by groups".
"""


def main(argv: list[str] | None = None) -> None:
    """Install the hooks, then run the script as `__main__`. Exits with 2 and one line on bad input."""
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        script = _prepare(options)
        sys.argv = [script, *_configured(options), *options.arguments[1:]]
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except ConfigurationError as error:
        _exit_with(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_basp.launch",
        usage="torchrun … -m megatron_basp.launch [-h] [--cpu] [--config FILE …] [-m] SCRIPT [Megatron's flags]",
        description="Run a Megatron training script, unmodified, with --sequence-parallel-mode registered.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="run without CUDA, over gloo (tests, demos, laptops)")
    parser.add_argument(
        "--config",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="YAML whose keys are Megatron's flags, as in configs/train; may be repeated, a later one wins",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="SCRIPT [flags]", help="the script and its flags"
    )
    return parser


def _prepare(options: argparse.Namespace) -> str:
    """Everything that has to happen before the script is read: the path, the CPU backend, the hooks."""
    if not options.arguments:
        raise ConfigurationError("no SCRIPT given: name Megatron's pretrain_gpt.py, or -m and a module (see --help)")
    script = options.arguments[0]
    if options.module:
        if importlib.util.find_spec(script) is None:
            raise ConfigurationError(f"there is no module {script}: give its full name, as for python -m")
    else:
        if not Path(script).is_file():
            raise ConfigurationError(f"there is no script {script}: give the path of Megatron's pretrain_gpt.py")
        # As `python SCRIPT` would: first, so that a checkout's own Megatron wins over an installed one as a whole.
        sys.path.insert(0, str(Path(script).resolve().parent))
    if options.cpu:
        from megatron_basp import cpu

        cpu.install()
    root = megatron_root()
    from megatron_basp.megatron import hooks

    hooks.install()
    if os.environ.get("RANK", "0") == "0":
        from megatron_basp.megatron.versions import SUPPORTED, megatron_minor, megatron_version

        tried = SUPPORTED[megatron_minor()]
        print(f"> megatron_basp: Megatron-Core {megatron_version()} from {root}, tried with {tried}", flush=True)
    return script


def _configured(options: argparse.Namespace) -> list[str]:
    """What the layers say, in words of a command line; rank 0 prints the whole command. With the hooks in."""
    if not options.config:
        return []
    from megatron_basp.megatron.command_line import flag_parser
    from megatron_basp.megatron.config_flags import config_words
    from megatron_basp.run_config import load_config

    words = config_words(load_config(options.config).settings, flag_parser(), options.arguments[1:])
    if os.environ.get("RANK", "0") == "0":
        switches = ["--cpu"] * options.cpu + ["-m"] * options.module
        command = ["-m", "megatron_basp.launch", *switches, options.arguments[0], *words, *options.arguments[1:]]
        print(f"> megatron_basp: python {shlex.join(command)}", flush=True)
    return words


def megatron_root() -> Path:
    """The folder that `megatron` comes from.

    `megatron` is a namespace package: `megatron.core` can come from a wheel and `megatron.training` from a checkout,
    which are then of different versions and fail late, or not at all.

    Raises:
        ConfigurationError: one of them is missing, or they come from two places.
    """
    roots = {}
    for name in ("megatron.core", "megatron.training"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in ("megatron", name):
                raise
            raise ConfigurationError(
                f"{name} is not installed: pip install 'megatron-core[training]>=0.18,<0.20', or run a script of a "
                "checkout"
            ) from error
        roots[name] = Path(str(module.__file__)).resolve().parents[2]
    core, training = roots.values()
    if core != training:
        raise ConfigurationError(
            f"two Megatrons are on the path: megatron.core from {core}, megatron.training from {training}: take one "
            f"of them off PYTHONPATH, or run the script of the one that you mean"
        )
    return core


def _exit_with(message: str) -> NoReturn:
    # On every rank: most faults are found by all of them, but a file may be missing on one host only.
    print(f"megatron_basp: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
