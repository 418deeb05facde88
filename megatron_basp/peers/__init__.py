"""Our exchange beside others' in one run: `megatron-basp bench attention`."""
