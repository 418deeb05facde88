import re
from pathlib import Path

from setuptools import find_packages, setup

# Read as text: importing the package would need it to be installed already.
version_file = Path(__file__).parent / "megatron_basp" / "version.py"
version = re.search(r'__version__ = "(.+)"', version_file.read_text())[1]

setup(
    name="megatron-basp",
    version=version,
    description="Batch-aware sequence parallelism for Megatron-Core",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_basp*"]),
    entry_points={"console_scripts": ["megatron-basp = megatron_basp.cli.main:main"]},
    install_requires=[
        "megatron-core[training]>=0.18,<0.20",
        "torch",
        "numpy",
        "PyYAML",
        "tqdm",
        "rich",
        "matplotlib",
        "tokenizers",
        "transformers",
    ],
    extras_require={
        "te": ["transformer-engine[core_cu13,pytorch]>=2.20,<2.21"],
        "bench": ["psutil"],
        "dev": ["einops", "hypothesis", "mypy", "pre-commit", "pytest", "ruff", "types-PyYAML", "uv"],
    },
)
