"""Memory of the fullest rank, by what it holds. Pure.

Activations are counted as Megatron's layers save them for backward with Transformer Engine: elements a token and
layer, see `_saved_elements`. It is an estimate: fragmentation and workspaces are in `RESERVED_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_basp.parallel_cost import parameters_of_rank
from megatron_basp.training_spec import TrainingSpec

# CUDA's context, communicators, workspaces, fragmentation: assumed.
RESERVED_BYTES = 2e9


@dataclass(frozen=True)
class MemoryCost:
    """Of one rank; reserved is what CUDA and communicators take."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    logit_bytes: float
    reserved_bytes: float = RESERVED_BYTES

    @property
    def total_bytes(self) -> float:
        return float(sum(vars(self).values()))


def memory_of(training: TrainingSpec, largest_group_size: int) -> MemoryCost:
    """Args: largest_group_size: the largest K, at which key-value heads are copied most."""
    model, parallelism = training.model, training.parallelism
    dense, experts = parameters_of_rank(training)
    element, gradient = training.element_bytes, training.gradient_bytes
    # Two moments in fp32, and the fp32 weights where parameters are in less.
    optimizer = 8 if training.precision == "fp32" else 12
    shards = ("no_shard", "optim", "optim_grads", "optim_grads_params").index(parallelism.sharding)

    def divided(bytes_each: int, is_sharded: bool) -> float:
        of_dense = parallelism.replicas if is_sharded else 1
        of_experts = parallelism.replicas // parallelism.expert_model_parallel_size if is_sharded else 1
        return bytes_each * (dense / of_dense + experts / of_experts)

    parameter_bytes = divided(element, shards >= 3)
    layers = model.layers // parallelism.pipeline_model_parallel_size
    if shards >= 3:  # two layers are whole at a time, one in use and one on its way
        parameter_bytes += 2 * element * min(1.0, 1 / layers) * (dense + experts)
    whole, without_core, core = _saved_elements(training, largest_group_size)
    per_layer = {"none": whole, "selective": without_core, "full": training.model.hidden / _spread(training)}
    saved = per_layer[parallelism.recompute] * layers
    # Of the layer that is being recomputed.
    again = {"none": 0.0, "selective": core, "full": whole}[parallelism.recompute]
    first_in_flight, last_in_flight = _in_flight(training)
    activations = (saved * first_in_flight + again) * training.tokens * element
    # For the loss: logits in the model's precision, in fp32, and their gradient. The first stage of several, which has
    # most micro-batches in flight, has none; the last, which has them, has fewest.
    logits = training.tokens * model.vocabulary / parallelism.tensor_model_parallel_size * (2 * element + 4)
    last = (saved * last_in_flight + again) * training.tokens * element
    if parallelism.pipeline_model_parallel_size > 1:
        activations, logits = max((activations, 0.0), (last, logits), key=sum)
    return MemoryCost(
        parameter_bytes=parameter_bytes,
        gradient_bytes=divided(gradient, shards >= 2),
        optimizer_bytes=divided(optimizer, shards >= 1),
        activation_bytes=activations,
        logit_bytes=logits,
    )


def _in_flight(training: TrainingSpec) -> tuple[float, float]:
    """Micro-batches of which a stage holds activations: (the first stage, the last).

    Virtual stages are interleaved: a first stage sends two micro-batches' chunks ahead for each further stage, and
    all stages hold every chunk but one of as many micro-batches as there are stages.
    """
    stages, virtual = training.parallelism.pipeline_model_parallel_size, training.parallelism.virtual_stages
    first = stages + (stages - 1) / virtual if virtual > 1 else stages
    last = ((virtual - 1) * stages + 1) / virtual
    return min(first, training.micro_batches), min(last, training.micro_batches)


def _spread(training: TrainingSpec) -> int:
    """Over how many ranks activations between the tensor-parallel layers are spread."""
    parallelism = training.parallelism
    return parallelism.tensor_model_parallel_size if parallelism.sequence_parallel else 1


def _saved_elements(training: TrainingSpec, group_size: int) -> tuple[float, float, float]:
    """Elements that a layer saves a token: (all; where core attention keeps its inputs alone; what its core saves)."""
    model, shape = training.model, training.attention_shape
    size, tensor_parallel = shape.query_head_size, training.parallelism.tensor_model_parallel_size
    norms = 4 * model.hidden / _spread(training)  # each of two: its input and its output
    # As they arrive from the exchange, key-value heads copied; alone, a rank has what the projections gave.
    query_key_value = (shape.heads + 2 * max(shape.kv_heads, group_size)) * size
    output = shape.heads * size
    # What the kernel gave; alone, that is what the output's projection takes.
    core = query_key_value + (output if group_size > 1 else 0)
    matrices = 3 if model.gated else 2  # what the activation function takes and gives
    if model.experts:
        # And the token as it goes in, gathered from tensor-parallel ranks, and as it comes out, scattered over them.
        each = matrices * model.expert_ffn / tensor_parallel + model.hidden * (1 + 1 / tensor_parallel)
        mlp = model.experts_per_token * each + matrices * model.shared_expert_ffn / tensor_parallel
    else:
        mlp = matrices * model.ffn / tensor_parallel
    return norms + core + output + mlp, norms + query_key_value + output + mlp, core
