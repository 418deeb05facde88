"""Models and clusters by name, from the `configs/` folder of this repository. Pure."""

from __future__ import annotations

from pathlib import Path

from megatron_basp.cluster import ClusterSpec, load_cluster
from megatron_basp.errors import ConfigurationError
from megatron_basp.model_spec import ModelSpec, load_model

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS, CLUSTERS = CONFIGS / "models", CONFIGS / "hardware"


def named_model(name_or_file: str) -> ModelSpec:
    """A model of `configs/models/`, or of a file: our YAML, or a Hugging Face `config.json`.

    Raises:
        ConfigurationError: there is no such model, or the file is not one.
    """
    _check_folder(name_or_file, MODELS)
    return load_model(name_or_file, MODELS)


def named_cluster(name_or_file: str) -> ClusterSpec:
    """A cluster of `configs/hardware/`, or of a YAML file.

    Raises:
        ConfigurationError: there is no such cluster, or the file is not one.
    """
    _check_folder(name_or_file, CLUSTERS)
    return load_cluster(name_or_file, CLUSTERS)


def no_cluster() -> str:
    """What to say where a cluster is needed and none is named."""
    return f"seconds depend on the cluster: name one with --cluster, {', '.join(names(CLUSTERS))} or a .yaml file"


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _check_folder(name_or_file: str, folder: Path) -> None:
    """A file needs no folder; a name does, and an installed package has left it behind."""
    if not folder.is_dir() and Path(name_or_file).suffix not in (".yaml", ".yml", ".json"):
        raise ConfigurationError(
            f"there is no {folder} to look {name_or_file} up in, since megatron_basp was installed without its "
            f"repository: give a file, or install with pip install -e"
        )
