"""For all tests."""

from hypothesis import settings

# No deadline: tests share a few cores with others, and what is tested here is never how long it takes.
settings.register_profile("megatron_basp", deadline=None)
settings.load_profile("megatron_basp")
