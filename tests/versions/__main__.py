"""The hooks and small training runs with every Megatron that is supported, each in a process of its own.

    python -m tests.versions [CHECKOUT …] [-- PYTEST'S ARGUMENTS]     # make test-versions MEGATRON="CHECKOUT …"

The newest wheel of each released version is unpacked, and checkouts are copied (nothing is written into them), into a
folder each under .venv-versions. All else, torch included, is what this interpreter has. Pytest runs tests/versions,
or what its arguments name: all end-to-end tests work with `--megatron FOLDER`.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_basp.megatron.versions import RELEASED

FOLDER = Path(__file__).parents[2] / ".venv-versions"
HELPER = Path("megatron", "core", "datasets", "helpers.cpp")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="of Megatron-LM")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    checkouts = parser.parse_args(sys.argv[1:split]).checkouts
    for checkout in checkouts:
        if not (checkout / "megatron" / "core").is_dir():
            parser.error(f"{checkout} is no checkout of Megatron-LM: it has no megatron/core")
    roots = {f"wheel {minor}": unpacked_wheel(minor) for minor in RELEASED}
    roots |= {f"checkout {checkout}": copied_checkout(checkout) for checkout in checkouts}
    tests = sys.argv[split + 1 :] or ["tests/versions"]
    failed = []
    for name, root in roots.items():
        print(f"\n> {name}", flush=True)
        pytest = [sys.executable, "-m", "pytest", f"--megatron={root}", *tests]
        if subprocess.run(pytest, cwd=FOLDER.parent).returncode:
            failed.append(name)
    print("\n".join(f"{name}: {'FAILED' if name in failed else 'passed'}" for name in roots))
    return 1 if failed else 0


def unpacked_wheel(minor: str) -> Path:
    """The newest release of a minor version, without what it depends on."""
    root = FOLDER / f"wheel-{minor}"
    shutil.rmtree(root, ignore_errors=True)
    uv = Path(sys.executable).parent / "uv"
    into = ["--quiet", "--python", sys.executable, "--target", str(root)]
    subprocess.run([uv, "pip", "install", *into, "--no-deps", f"megatron-core=={minor}.*"], check=True)
    return root


def copied_checkout(checkout: Path) -> Path:
    """Scripts and packages of a checkout. It has no compiled data-set helper: that of the installed wheel is taken,
    where it was made of the same source."""
    root = FOLDER / "-".join(("checkout", *checkout.resolve().parts[1:]))
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(checkout / "megatron", root / "megatron")
    for script in checkout.glob("*.py"):
        shutil.copy(script, root)
    spec = importlib.util.find_spec("megatron")
    installed = Path(spec.submodule_search_locations[0]).parent  # type: ignore[union-attr,index]
    if not filecmp.cmp(installed / HELPER, root / HELPER, shallow=False):
        sys.exit(f"{checkout}: {HELPER} is another than the installed wheel's: compile it in the checkout, with make")
    for compiled in (installed / HELPER).parent.glob("helpers_cpp*.so"):
        shutil.copy(compiled, (root / HELPER).parent)
    return root


if __name__ == "__main__":
    sys.exit(main())
