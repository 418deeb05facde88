"""How close the packing kernels come to a plain copy of the same bytes, on one GPU. Not measured yet.

    .venv/bin/python scripts/bench/kernels_on_gpu.py          (or: make bench-gpu)

`share_of_copy` is the time of torch's copy_ that reads and writes as many bytes, over the kernel's; the goal is 0.85.
Medians, with the L2 cache emptied before each run. Rotary tables are read on top, and are not counted as moved.
Document of --json: {"device", "tokens", "rows": [{"model", "K", "operation", "moved_bytes", "kernel_microseconds",
"copy_microseconds", "share_of_copy"}]}. Without CUDA it exits with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from megatron_basp.errors import ConfigurationError
from megatron_basp.kernels import Rotary, moved_bytes, pack_heads, unpack_heads
from megatron_basp.library import named_model

# Those of the paper, arXiv 2609.03151, or the nearest of the library.
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen1.5-1.8b", "qwen2.5-3b", "qwen3-8b")
GROUP_SIZES = (2, 4, 8)
GOAL = 0.85


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="The packing kernels against a copy of the same bytes.", allow_abbrev=False
    )
    parser.add_argument(
        "--models", nargs="+", default=MODELS, metavar="NAME|FILE", help="shapes (default: the paper's)"
    )
    parser.add_argument("--tokens", type=int, default=8192, metavar="T", help="on this rank (default 8192)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    options = parser.parse_args(argv)
    try:
        if options.tokens < 1:
            raise ConfigurationError(f"--tokens must be 1 or more, got {options.tokens}")
        if not torch.cuda.is_available():
            raise ConfigurationError("no CUDA device is visible, and the share of copy bandwidth is that of a GPU")
        models = {name: named_model(name) for name in options.models}
    except ConfigurationError as error:
        print(f"kernels_on_gpu: error: {error}", file=sys.stderr)
        return 2
    rows = []
    for name, model in tqdm(models.items(), file=sys.stderr):
        heads = (model.heads, model.kv_heads)
        rows += measure(name, heads, model.head_size, options.tokens, "cuda", median_seconds)
    device = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps({"device": device, "tokens": options.tokens, "rows": rows}))
    else:
        show(device, options.tokens, rows)
    return 0


def median_seconds(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return do_bench(work, return_mode="median") / 1e3


def measure(
    model: str,
    heads: tuple[int, int],
    head_size: int,
    tokens: int,
    device: str,
    seconds: Callable[[Callable[[], Any]], float],
) -> Iterator[dict[str, Any]]:
    """The rows of one model: heads is (H, Hkv), `seconds` times a call."""
    for ranks in GROUP_SIZES:
        if heads[0] % ranks:
            continue
        for operation, work, moved in _operations(heads, head_size, ranks, tokens, device):
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            kernel, copy = seconds(work), seconds(partial(torch.empty_like(source).copy_, source))
            yield {
                "model": model,
                "K": ranks,
                "operation": operation,
                "moved_bytes": moved,
                "kernel_microseconds": kernel * 1e6,
                "copy_microseconds": copy * 1e6,
                "share_of_copy": copy / kernel,
            }


def _operations(
    heads: tuple[int, int], head_size: int, ranks: int, tokens: int, device: str
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """What a layer does in bf16: q, k and v to the ranks and back, rotated or not, and the output from them."""
    make = partial(torch.zeros, dtype=torch.bfloat16, device=device)
    qkv = [make(tokens, count, head_size) for count in (heads[0], heads[1], heads[1])]
    per_rank = [max(x.shape[1], ranks) // ranks for x in qkv]
    buffer = make(ranks, tokens, sum(per_rank) * head_size)
    parts: list[Tensor] = [
        part.unflatten(2, (-1, head_size)) for part in buffer.split([count * head_size for count in per_rank], dim=2)
    ]
    rotary = Rotary.from_angles(torch.zeros(tokens, head_size, device=device), torch.bfloat16)
    output, received = make(tokens, heads[0], head_size), make(ranks, tokens, heads[0] // ranks, head_size)
    yield "pack q, k, v", partial(pack_heads, qkv, parts), moved_bytes(qkv, parts)
    yield "pack and rotate", partial(pack_heads, qkv, parts, rotary), moved_bytes(qkv, parts)
    yield "unpack gradients", partial(unpack_heads, parts, qkv), moved_bytes(parts, qkv)
    yield "unpack and rotate back", partial(unpack_heads, parts, qkv, rotary), moved_bytes(parts, qkv)
    yield "unpack output", partial(unpack_heads, [received], [output]), moved_bytes([received], [output])


def show(device: str, tokens: int, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{device}, {tokens} tokens a rank, bf16; the goal is {GOAL} of a copy")
    for heading, side in (("model", "left"), ("K", "right"), ("operation", "left")):
        table.add_column(heading, justify=side)
    for heading in ("moved MB", "kernel µs", "copy µs", "share of copy"):
        table.add_column(heading, justify="right")
    for row in rows:
        colour = "green" if row["share_of_copy"] >= GOAL else "red"
        table.add_row(
            *(row["model"], str(row["K"]), row["operation"], f"{row['moved_bytes'] / 1e6:.0f}"),
            *(f"{row[key]:.0f}" for key in ("kernel_microseconds", "copy_microseconds")),
            f"[{colour}]{row['share_of_copy']:.2f}[/{colour}]",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
