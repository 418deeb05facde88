"""Megatron without CUDA: for tests, demos and laptops.

`install()` answers, on the CPU, the calls to `torch.cuda` that Megatron makes without asking whether there is a GPU.
`torch.cuda.is_available()` stays False: torch's own code trusts it. Each patch stands under the reason for it; what
has to change inside Megatron is in `megatron_basp.megatron.on_cpu`.

Install before Megatron is imported: `megatron.core.tensor_parallel.random` binds `torch.cuda._lazy_call` when it is
imported, and the real one would queue the seeding of the generators for ever, silently.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from megatron_basp.errors import ConfigurationError

_CPU = torch.device("cpu")

# Every factory that Megatron calls with `device="cuda"` or a device index. The methods too, for `x.new_empty(…)`.
_FACTORIES = [
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
]
_TENSOR_FACTORIES = ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]


def install(force: bool = False) -> None:
    """Patch torch, then Megatron, for this process and those forked from it.

    Args:
        force: also on a machine with CUDA, which is refused otherwise: one would compute on the CPU without noticing.

    Raises:
        ConfigurationError: there is a GPU.
        RuntimeError: Megatron was imported already.
    """
    if torch.cuda.is_available() and not force:
        raise ConfigurationError("the CPU backend is for machines without CUDA, and this one has it: leave --cpu out")
    if "megatron.core" in sys.modules:
        raise RuntimeError("the CPU backend must be installed before megatron.core is imported; it has been already")
    _map_devices_to_cpu()
    answer_device_queries()
    _use_the_cpu_generator()
    make_streams_no_ops()
    _set_environment()
    from megatron_basp.megatron import on_cpu

    on_cpu.install()


def is_cuda_device(device: Any) -> bool:
    """Whether a `device` argument means a GPU; a bare number does."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _map_devices_to_cpu() -> None:
    """`device="cuda"`, `.cuda()` and `.to("cuda")` are everywhere; so is pinned memory, which needs a driver."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_cuda_device(kwargs.get("device")):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapper

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))

    plain_to, plain_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_CPU if is_cuda_device(arg) else arg for arg in args)
        if is_cuda_device(kwargs.get("device")):
            kwargs["device"] = _CPU
        return plain_to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The distributed optimizer sorts parameters by the string `torch.cuda.FloatTensor`.
        result = plain_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.to = to
    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self


def answer_device_queries() -> None:
    """Megatron makes groups only where `device_count() > 0`, and asks CP > 1 for the architecture's version."""
    cuda = torch.cuda
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.get_device_name = lambda device=None: "CPU"
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="CPU", major=8, minor=0, multi_processor_count=1, total_memory=0
    )
    # Memory reports: 0 is what is in use of a GPU that is not there.
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.memory_stats = lambda device=None: {}
    cuda.mem_get_info = lambda device=None: (0, 0)
    cuda.empty_cache = lambda: None
    cuda.reset_peak_memory_stats = lambda device=None: None


def _use_the_cpu_generator() -> None:
    """Megatron's RNG tracker forks the CUDA generator's state; the CPU has one generator, which takes its place."""
    cuda, generator = torch.cuda, torch.random.default_generator
    cuda.default_generators = (generator,)
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.init = lambda: None
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device="cuda": torch.random.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.random.set_rng_state(state)
        module.manual_seed = generator.manual_seed
        module.manual_seed_all = generator.manual_seed

    # An iterator over a loader draws a seed for its workers from the CPU's generator, and only tensor-parallel rank 0
    # has a loader: with one generator for both, tensor-parallel ranks would drop different elements from then on, and
    # a resumed run others than the uninterrupted one.
    plain_init = _BaseDataLoaderIter.__init__

    def __init__(self: Any, loader: Any) -> None:
        state = generator.get_state()
        plain_init(self, loader)
        generator.set_state(state)

    _BaseDataLoaderIter.__init__ = __init__


class _Event:
    """Something that has always happened already: the CPU works through its tasks in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    """The one stream that a CPU has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


def make_streams_no_ops() -> None:
    """Timers synchronise, the data-parallel wrapper and the schedules order streams."""
    cuda, stream = torch.cuda, _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.set_stream = lambda stream: None
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    torch.Tensor.record_stream = lambda self, stream: None
    cuda.nvtx = SimpleNamespace(
        range_push=lambda message: None,
        range_pop=lambda: None,
        mark=lambda message: None,
        range=contextlib.nullcontext,
    )


def _set_environment() -> None:
    # Megatron asserts it for CP > 1. It says how CUDA queues kernels, and there are none.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # Megatron compiles small functions where they are defined; on a CPU the first iterations would take 10 to 20 s.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # One rank without torchrun still meets itself at a rendezvous.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
