"""The exchange as it is on a GPU, over gloo: q, k and v each in storage of its own."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from megatron_basp import all_to_all


@contextmanager
def tensors_of_their_own():
    """As on a GPU, over gloo, which sends what NCCL sends in one launch one after the other. Yields how many tensors
    each launch sent."""
    launches = []

    @contextmanager
    def coalescing(group, device, async_ops):
        works = []

        def all_to_all_single(*arguments, **options):
            works.append(plain(*arguments, **options))

        plain = dist.all_to_all_single
        with mock.patch.object(dist, "all_to_all_single", all_to_all_single):
            yield SimpleNamespace(wait=lambda: [work.wait() for work in works])
        launches.append(len(works))

    with (
        mock.patch.object(all_to_all, "sends_several_at_once", lambda x: True),
        mock.patch.object(dist, "_coalescing_manager", coalescing),
    ):
        yield launches
