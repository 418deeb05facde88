"""FP8 in linear layers: what a rank's stream has to fulfil. Attention stays in the precision of the model.

A linear layer sees T tokens, as under stock context parallelism, and Megatron takes the group over which Transformer
Engine reduces amaxes from `parallel_state`, which the plan does not touch: TP×CP×DP ranks. With delayed scaling the
scales are hence those of the whole micro-batch, whichever rank holds which token. The other recipes scale what a rank
holds by itself, a tensor or 32 or 128 neighbours at a time; which tokens these are is the plan's choice.
"""

from __future__ import annotations

import argparse
import math

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.settings import Settings

# What the sizes of a recipe's GEMMs are multiples of (`get_fp8_align_size` in `core/fp8_utils.py`). The gradient of a
# weight sums over tokens, so it holds for their number too.
ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def check_fp8(args: argparse.Namespace, settings: Settings) -> None:
    """Raise `ConfigurationError` for FP8 that no layer would use, or whose GEMMs do not take the stream."""
    if args.fp8 is None:
        return
    if args.transformer_impl != "transformer_engine":
        raise ConfigurationError(
            f"--fp8-format {args.fp8} does nothing without Transformer Engine's layers: add --transformer-impl "
            "transformer_engine, or leave it out"
        )
    alignment = ALIGNMENT[args.fp8_recipe]
    # With tensor-parallel sequence parallelism a rank quantizes its slice of the stream.
    slices = settings.tensor_model_parallel_size if args.sequence_parallel else 1
    for batch_size in settings.batch_sizes():
        plan = settings.plan(batch_size, settings.seq_length)
        if plan.tokens % (alignment * slices):
            whole = alignment * slices * settings.ranks
            factor = math.lcm(whole // math.gcd(whole, batch_size), 2 * settings.ranks)
            raise ConfigurationError(
                f"--fp8-recipe {args.fp8_recipe} needs T % {alignment * slices} to be 0 for the T = B·S/N tokens on a "
                f"rank, got T={plan.tokens} from B={batch_size}, S={settings.seq_length} and N={settings.ranks}: the "
                f"next --seq-length that works is {-(-settings.seq_length // factor) * factor}"
            )
