"""`megatron-basp SUBCOMMAND`: exits with 0 on success, 2 and one line on bad input, 1 on a failed check."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from megatron_basp import __version__
from megatron_basp.errors import ConfigurationError, RankFailed

SUBCOMMANDS = ("demo", "verify", "plan", "bench", "reproduce")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-basp",
        description="Batch-aware sequence parallelism for Megatron-Core: try it, prove it, plan it.",
        epilog="To train, see python -m megatron_basp.launch --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-basp {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    words = sys.argv[1:] if argv is None else argv
    # Some import torch, which takes seconds: the one that is called is enough.
    for name in words[:1] if words[:1] and words[0] in SUBCOMMANDS else SUBCOMMANDS:
        import_module(f"megatron_basp.cli.{name}").add_parser(subcommands)
    options = parser.parse_args(words)
    try:
        return options.run(options)
    except ConfigurationError as error:
        print(f"megatron-basp: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"megatron-basp: error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"megatron-basp: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megatron-basp: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
