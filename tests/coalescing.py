"""A backend that coalesces, as NCCL does, played by gloo, which sends one tensor after the other."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from megatron_basp import transport


@contextmanager
def launches_of_several_tensors():
    """Yields how many tensors each launch sent."""
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
        mock.patch.object(transport, "_coalesces", lambda group, device: True),
        mock.patch.object(dist, "_coalescing_manager", coalescing),
    ):
        yield launches
