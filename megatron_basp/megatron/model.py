"""The model's view: no context parallelism, positions from the plan, and core attention that knows better.

After construction the model is walked, because CP = 1 in its configuration switches Megatron's own guards off: a layer
that kept stock attention would train on, each rank on a part of its sequences, with a plausible loss.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from megatron_basp.attention import BaspAttention
from megatron_basp.batch import stream_positions
from megatron_basp.megatron.core_attention import recompute_inside_of_the_exchange
from megatron_basp.megatron.multi_token import number_behind_decoder
from megatron_basp.megatron.offloading import check_offloading
from megatron_basp.megatron.refusals import refuse_capacity_of_shards, refuse_unsupported_config
from megatron_basp.megatron.rotary import rotate_while_packing
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function
from megatron_basp.plan import BatchPlan

# Modules that work on each token by itself, by the names of their classes in these packages. All others are refused.
KNOWN_PACKAGES = frozenset({"megatron", "megatron_basp", "torch", "transformer_engine", "apex"})
TOKEN_WISE = frozenset(
    # Embeddings, norms, linear layers, activations (Megatron's own, Transformer Engine's, Apex's), routing of single
    # tokens.
    """
    VocabParallelEmbedding Embedding RotaryEmbedding YarnRotaryEmbedding Dropout Identity IdentityOp IdentityFuncOp
    LayerNorm RMSNorm FusedLayerNorm L2Norm TENorm
    ColumnParallelLinear RowParallelLinear TEColumnParallelLinear TERowParallelLinear TELinear
    TELayerNormColumnParallelLinear TEColumnParallelGroupedLinear TERowParallelGroupedLinear TopKRouter
    SwiGLU GEGLU GELU
    """.split()
)
ROTARY = frozenset({"RotaryEmbedding", "YarnRotaryEmbedding"})
CONTAINERS = frozenset(
    """
    GPTModel LanguageModelEmbedding TransformerBlock TransformerLayer MoETransformerLayer ModuleList SelfAttention
    MLP TEFusedMLP MoELayer SequentialMLP TEGroupedMLP GroupedMLP SharedExpertMLP StreamRotaryEmbedding
    MultiTokenPredictionBlock MultiTokenPredictionLayer MLASelfAttention FusedMLASelfAttention
    """.split()
)


def building_model(runtime: Runtime, original: Function) -> Function:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not runtime.is_active:
            return original(self, *args, **kwargs)
        from megatron.core.process_groups_config import ProcessGroupCollection

        arguments = signature.bind(self, *args, **kwargs).arguments
        refuse_unsupported_config(arguments["config"], runtime.settings.mode)
        refuse_capacity_of_shards(arguments["config"], runtime.settings.group_sizes(), runtime.settings.mode)
        check_offloading(arguments["config"])
        groups = arguments.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
        arguments["config"], arguments["pg_collection"] = without_context_parallelism(
            arguments["config"], groups, runtime
        )
        original(**arguments)
        read_positions_from_plan(self, runtime)
        number_behind_decoder(self)
        recompute_inside_of_the_exchange(self)
        rotate_while_packing(self)
        check_model(self)

    return __init__


class StreamRotaryEmbedding(torch.nn.Module):
    """Megatron's rotary table, a row for each token of this rank's stream.

    Takes the place of a `RotaryEmbedding` or `YarnRotaryEmbedding` in a built model. The inner one makes the table of
    S positions, as for a group of one; the plan says which of them this rank holds, and where.
    """

    def __init__(self, inner: torch.nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.inner = inner
        self.plan_holder = runtime.plan_holder
        self.groups = runtime.groups
        self._latest: tuple[BatchPlan, Any] | None = None
        self._packed: Any = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
    ) -> int:
        """T, packed or not. Models ask for it right before they call `forward`, and tell only here of documents."""
        self._packed = packed_seq_params
        return self.inner.get_rotary_seq_len(inference_context, transformer, transformer_input, transformer_config)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """[T, 1, 1, dim], and with YaRN the scale of attention behind it; the signatures of
        `core/models/common/embeddings/rotary_pos_embedding.py` and `yarn_rotary_pos_embedding.py`."""
        plan = self.plan_holder.plan
        if max_seq_len != plan.tokens or offset or packed_seq or cp_group is not None:
            raise ValueError(
                f"rotary positions are planned for a stream of {plan.tokens} tokens, and the model asked for "
                f"{max_seq_len} (offset {offset}, packed {packed_seq}, group {cp_group})"
            )
        packed, self._packed = self._packed, None
        if packed is not None:
            return self._rows_of_table(plan, packed.positions)
        if self._latest is None or self._latest[0] is not plan:
            self._latest = (plan, self._rows_of_table(plan))
        return self._latest[1]

    def _rows_of_table(self, plan: BatchPlan, positions: torch.Tensor | None = None) -> Any:
        made = self.inner(plan.lengths[0], cp_group=self.groups.alone)
        table, *scale = made if isinstance(made, tuple) else (made,)
        if positions is None:
            positions = stream_positions(plan, self.groups.cp_rank, table.device)
        table = table[positions]
        return (table, *scale) if scale else table

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype = torch.float32, packed_seq: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the same, scaled, [T, 1, 1, dim] each: what the fused YaRN of multi-latent attention
        reads, one row for each token (`core/fusions/fused_mla_yarn_rope_apply.py`)."""
        table, scale = self(seq_len, offset, packed_seq)
        return (table.cos() * scale).to(dtype), (table.sin() * scale).to(dtype)


def without_context_parallelism(config: Any, pg_collection: Any, runtime: Runtime) -> tuple[Any, Any]:
    """Copies of a model's configuration and groups in which context parallelism is off; the originals stay as they
    are, since schedules, data-parallel wrapper and optimizer need them."""
    if config.context_parallel_size != runtime.settings.ranks:
        raise ValueError(
            f"the model's configuration has context_parallel_size={config.context_parallel_size}, and the run was "
            f"planned for --context-parallel-size {runtime.settings.ranks}"
        )
    config, pg_collection = copy.copy(config), copy.copy(pg_collection)
    config.context_parallel_size = 1
    pg_collection.cp = runtime.groups.alone
    return config, pg_collection


def read_positions_from_plan(model: torch.nn.Module, runtime: Runtime) -> None:
    """Replace the model's rotary tables. (Learned positions need nothing: their ids are part of the batch.)

    A pipeline stage without attention has a table that nobody reads; where it takes the loss of several tokens, what
    arrives is their streams one behind the other, and Megatron asks for as many positions.
    """
    if not any(isinstance(module, BaspAttention) for module in model.modules()):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in ROTARY:
                setattr(module, name, StreamRotaryEmbedding(child, runtime))


def check_model(model: torch.nn.Module) -> None:
    """Make sure that nothing in a built model mixes tokens but BASP attention.

    Raises:
        ValueError: names the module, its class and what to do.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name.endswith("core_attention") and not isinstance(module, BaspAttention):
            raise ValueError(
                f"{name} is {kind}, not BASP attention: its ranks would attend to a part of each sequence only. "
                f"Layers that name their own attention (--spec, heterogeneous, hybrid) are not supported"
            )
        is_known = type(module).__module__.partition(".")[0] in KNOWN_PACKAGES and kind in TOKEN_WISE | CONTAINERS
        if isinstance(module, BaspAttention) or is_known:
            continue
        if _is_inside_token_wise(model, name):
            continue
        raise ValueError(
            f"{name or 'the model'} is {kind}, which is not known to work on each token by itself: in a stream of "
            "several sequences it could mix them. If it does not, it belongs in TOKEN_WISE of "
            "megatron_basp/megatron/model.py"
        )


def _is_inside_token_wise(model: torch.nn.Module, name: str) -> bool:
    """Whether some parent is token-wise as a whole (a wrapped norm holds another module)."""
    parts = name.split(".")
    parents = (".".join(parts[:i]) for i in range(1, len(parts)))
    return any(type(model.get_submodule(parent)).__name__ in TOKEN_WISE for parent in parents)
