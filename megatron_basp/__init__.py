"""Batch-aware sequence parallelism for Megatron-Core: a sequence is shared by no more ranks than the batch leaves it.

Importing this package touches neither torch nor Megatron; `python -m megatron_basp.launch` does.
"""

from megatron_basp.version import __version__

__all__ = ["__version__"]
