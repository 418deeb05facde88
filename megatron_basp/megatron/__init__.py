"""Every contact with Megatron. Nothing outside of this package imports it."""
