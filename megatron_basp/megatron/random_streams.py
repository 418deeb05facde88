"""Random numbers of the ranks that work on one micro-batch: each draws its own, and they still share one state.

Megatron seeds the ranks of a context-parallel group alike, and a checkpoint holds one random state for all of them.
Left so, ranks would drop the same elements out of different heads and tokens; seeded by rank once and for all, they
would go on from another's state after a restart. So the state between two training calls is shared, and within a call
each rank draws from a stream of its own, which follows from that state and the rank alone. Afterwards the shared state
has advanced by one draw, whatever the ranks drew: a checkpoint has nothing new in it, and the run that resumes it
draws what the uninterrupted one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def streams_of_rank(cp_rank: int) -> Iterator[None]:
    """Within, the two states that dropout draws from are those of this rank of the CP group.

    They are the default generator's and the tensor-parallel one of Megatron's tracker
    (`core/tensor_parallel/random.py`). What Megatron has equal or different between tensor-parallel ranks stays so.
    The tracker's other states are for weights. Nothing waits for the GPU: the state of its generator lies on the host.
    """
    from megatron.core.tensor_parallel.random import _MODEL_PARALLEL_RNG_TRACKER_NAME as TENSOR_PARALLEL
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()

    def set_states(default: Tensor, tensor_parallel: Tensor) -> None:
        torch.cuda.set_rng_state(default)
        tracker.set_states({**tracker.get_states(), TENSOR_PARALLEL: tensor_parallel})

    shared = torch.cuda.get_rng_state(), tracker.get_states()[TENSOR_PARALLEL]
    set_states(*(_of_rank(state, cp_rank) for state in shared))
    try:
        yield
    finally:
        set_states(*map(_advanced, shared))


def _of_rank(state: Tensor, cp_rank: int) -> Tensor:
    """A state for each rank, as far from each other's as from those of any other shared state: hashed, since seeds
    that are close may be close to seeds that Megatron uses."""
    digest = hashlib.sha256(state.numpy().tobytes() + cp_rank.to_bytes(4)).digest()
    return _generator().manual_seed(int.from_bytes(digest[:8]) >> 1).get_state()


def _advanced(state: Tensor) -> Tensor:
    """By one draw, so that the period stays the generator's own."""
    generator = _generator()
    generator.set_state(state)
    torch.rand(1, generator=generator, device=generator.device)
    return generator.get_state()


def _generator() -> torch.Generator:
    """A new one, of the kind that Megatron draws from."""
    return torch.Generator(torch.cuda.default_generators[torch.cuda.current_device()].device)
