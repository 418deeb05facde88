"""What a run needs on this machine, packages and data, looked for before ranks wait for each other over it."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.text_dataset import check_text_dataset, count_documents


def check_environment(args: argparse.Namespace) -> None:
    """Raise `ConfigurationError` where a package that the flags need is not installed."""
    needs_einops = {
        "--num-distributed-optimizer-instances": (args.num_distributed_optimizer_instances or 1) > 1,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
    }
    for flag, is_used in needs_einops.items():
        if is_used and importlib.util.find_spec("einops") is None:
            raise ConfigurationError(f"{flag} needs einops, which is not installed: pip install einops")
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigurationError(
            "--transformer-impl transformer_engine (the default) needs Transformer Engine, which is not installed: "
            "install megatron-basp[te], or pass --transformer-impl local"
        )
    if args.sft and importlib.util.find_spec("datasets") is None:
        raise ConfigurationError(
            "--sft needs the package datasets, with which Megatron reads conversations, and it is not installed: pip "
            "install datasets"
        )


def check_data_files(args: argparse.Namespace) -> None:
    """Make sure that the data sets on local disks are there and whole, before ranks wait for each other over one.

    Raises:
        ConfigurationError: names the file that is missing or half-written, and the command that makes it; or the part
            of a split that gets no document, over which Megatron would loop for ever.
    """
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for word in getattr(args, name) or ():
            if _is_number(word) or "://" in word:
                continue
            if args.sft:
                _check_conversations(Path(word))
                continue
            check_text_dataset(Path(word))
            if name == "data_path" and args.split is not None:
                check_split(Path(word), args.split, is_evaluated=args.eval_iters != 0)


def _check_conversations(file: Path) -> None:
    if not file.is_file():
        raise ConfigurationError(
            f"{file}: missing; --sft reads a JSON file with an object a line, its conversations under 'messages'"
        )


def check_split(prefix: Path, split: str, is_evaluated: bool) -> None:
    """Raise `ConfigurationError` if training, or validation or test where they are used, gets no document."""
    shares = [float(share) for share in split.split(",")]
    documents = count_documents(prefix)
    bounds = [round(documents * sum(shares[:i]) / sum(shares)) for i in range(len(shares) + 1)]
    for index, part in enumerate(["training", "validation", "test"][: len(shares)]):
        if shares[index] and bounds[index] == bounds[index + 1] and (is_evaluated or part == "training"):
            raise ConfigurationError(
                f"--split {split} leaves no document for {part}, since {prefix} has {documents}: give more documents, "
                f"or another split"
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
