"""Which Megatrons the plugin knows: those with which `make test-versions` passed. docs/versions.md says how."""

from __future__ import annotations

from megatron_basp.errors import ConfigurationError

# By minor version: what the tests passed with.
SUPPORTED = {
    "0.18": "0.18.2",
    "0.19": "0.19.1 and 0.19.2",
    "0.20": "0.20.0 in development, commit d98e8a64",
}
RELEASED = ("0.18", "0.19")
IN_DEVELOPMENT = "0.20.0"  # what Megatron's main branch calls itself; what comes after it was never tried
REMEDY = f"use megatron-core {' or '.join(f'{minor}.x' for minor in RELEASED)}, or a release of megatron_basp for it"


class MegatronMismatch(ConfigurationError):
    """This Megatron is another one than this version of the plugin was written for."""


def megatron_version() -> str:
    from megatron.core.package_info import __version__

    return __version__


def megatron_minor() -> str:
    """`0.19` of 0.19.2, as the tables of hooks and refusals name versions."""
    return ".".join(megatron_version().split(".")[:2])


def check_version() -> None:
    """Raise `MegatronMismatch` unless Megatron is one that the hooks were tried with."""
    version = megatron_version()
    if megatron_minor() not in RELEASED and version.partition("+")[0] != IN_DEVELOPMENT:
        raise MegatronMismatch(
            f"megatron_basp was made for Megatron-Core {', '.join(RELEASED)} and {IN_DEVELOPMENT}, and this is "
            f"{version}: {REMEDY}"
        )
