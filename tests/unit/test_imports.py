"""What importing does not do, and where Megatron and torch are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_basp import cpu
from megatron_basp.errors import ConfigurationError

PACKAGE = Path(__file__).parents[2] / "megatron_basp"
PURE = [
    "errors",
    "cluster",
    "documents",
    "emulated.network",
    "emulated.results",
    "exchange_check",
    "fabric_fit",
    "hardware_file",
    "ledger",
    "ledger_file",
    "paper_model",
    "plan",
    "reproduction.loss",
    "reproduction.measure",
    "reproduction.modelled",
    "reproduction.report",
    "run_config",
    "search",
    "verdict",
    "text_files",
    "atomic_files",
    "megatron.settings",
    "megatron.refusals",
]


def in_a_fresh_interpreter(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_every_module_imports_no_megatron_and_leaves_torch_alone() -> None:
    names = sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "pretrain_gpt.py")  # the script is Megatron's own shape
    )
    assert len(names) > 20
    in_a_fresh_interpreter(
        "import sys, importlib, torch\n"
        "before = (torch.empty, torch.Tensor.to, torch.Tensor.cuda, torch.cuda.device_count, torch.nn.Module.cuda)\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "assert not [name for name in sys.modules if name.startswith(('megatron.', 'transformer_engine'))]\n"
        "after = (torch.empty, torch.Tensor.to, torch.Tensor.cuda, torch.cuda.device_count, torch.nn.Module.cuda)\n"
        "assert before == after"
    )


def test_pure_modules_import_no_torch() -> None:
    modules = ", ".join(f"megatron_basp.{name}" for name in PURE)
    in_a_fresh_interpreter(f"import sys, {modules}\nassert 'torch' not in sys.modules")


def test_only_the_megatron_package_names_megatron() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "megatron":
            text = path.read_text()
            assert "from megatron." not in text and "import megatron." not in text, path


def test_the_cpu_backend_refuses_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="leave --cpu out"):
        cpu.install()


def test_the_cpu_backend_refuses_to_come_after_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", object())
    with pytest.raises(RuntimeError, match=r"before megatron\.core is imported"):
        cpu.install()
