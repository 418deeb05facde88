"""These tests hold any Megatron to the same; `python -m tests.versions` says which with `--megatron FOLDER`."""

from tests.end_to_end.conftest import trainer  # noqa: F401
