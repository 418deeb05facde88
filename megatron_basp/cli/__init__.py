"""The `megatron-basp` command."""
