"""Packed rows: documents attend to themselves, in every group, as in one process that attends to each by itself."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_basp.errors import RankFailed
from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_samples, assert_same_training, batch, cp

MASKED = "--dataloader-inter-document-masking"
PARALLEL = {"tensor": "--tensor-model-parallel-size 2", "pipeline": "--pipeline-model-parallel-size 2"}
VIRTUAL = f"{PARALLEL['pipeline']} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

# What stands for the package `datasets`, of which Megatron uses this one function.
DATASETS = """
import json

def load_dataset(kind, data_files, split):
    assert (kind, split) == ("json", "all")
    with open(data_files) as lines:
        return [json.loads(line) for line in lines]
"""


class AttentionByDocument(torch.nn.Module):
    """softmax(Q·Kᵀ)·V of each document, written out: Megatron's own attention for the CPU refuses packed rows."""

    def __init__(self, config: Any, **others: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.window = config.window_size[0] if config.window_size else None

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *, packed_seq_params: Any, **others: Any) -> Any:
        assert mask is None and packed_seq_params.qkv_format == "thd"
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        outputs = []
        for start, stop in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))  # [h, length, d]
            scores = self.scale * q @ k.transpose(1, 2)
            unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            if self.window is not None:
                unseen |= unseen.new_ones(unseen.shape).tril(-self.window - 1)
            outputs.append((scores.masked_fill(unseen, -torch.inf).softmax(2) @ v).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def attend_by_document() -> None:
    from megatron.core.models.backends import LocalSpecProvider

    LocalSpecProvider.core_attention = lambda self: AttentionByDocument


def attend_by_document_on_every_stage() -> None:
    """Packed rows go through the model strung together, as [B·S, 1], and stock Megatron lets pipeline stages expect
    [S, B]: with B > 1 it fails, unless they are told."""
    from megatron.training import training

    choose = training.get_forward_backward_func

    def told(*args: Any, **kwargs: Any) -> Any:
        schedule = choose(*args, **kwargs)
        return lambda *, micro_batch_size, seq_length, **others: schedule(
            micro_batch_size=1, seq_length=micro_batch_size * seq_length, **others
        )

    training.get_forward_backward_func = told
    attend_by_document()


def conversations(seed: int) -> list[dict[str, str]]:
    """Some conversations of a few short turns, one behind the other, as a line of Megatron's SFT data holds them."""
    draw = random.Random(seed)
    words = "a ring of ranks sends its keys round and the sum of all heads is what one rank would have found".split()

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 7)))

    turns = []
    for _ in range(draw.randint(1, 5)):
        turns.append({"role": "system", "content": text()})
        for _ in range(draw.randint(1, 2)):
            turns += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return turns


@pytest.fixture(scope="module")
def sft(trainer: Trainer) -> Iterator[str]:
    """The flags of supervised fine-tuning on a few hundred lines of conversations."""
    from transformers import AutoTokenizer

    from megatron_basp.tokenizer import train_tokenizer

    lines = [conversations(seed) for seed in range(400)]
    data = trainer.folder / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in lines))
    texts = [f"{turn['role'].title()}\n{turn['content']}\n" for turns in lines for turn in turns]
    folder = train_tokenizer(texts, trainer.folder / "chat_tokenizer", vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Those that Megatron's format "nemotron-h-aligned" writes turns with, the last one for padding.
    tokenizer.add_tokens(["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"], special_tokens=True)
    tokenizer.save_pretrained(trainer.folder / "chat_tokenizer_with_roles")
    stand_in = trainer.folder / "stand_in"
    stand_in.mkdir()
    (stand_in / "datasets.py").write_text(DATASETS)
    if is_missing := find_spec("datasets") is None:
        sys.path.insert(0, str(stand_in))
    yield (
        f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {trainer.folder}/chat_tokenizer_with_roles "
        f"--data-path {data} --no-create-attention-mask-in-dataloader"
    )
    if is_missing:
        sys.path.remove(str(stand_in))


def assert_same_as_by_document(
    trainer: Trainer, flags: str, planned: str = cp(4), ranks: int = 1, sabotage: Callable[[], None] = lambda: None
) -> None:
    """4 ranks train as a run without context parallelism in which each document is attended to by itself."""
    run = trainer.planned(f"{flags} {planned}", ranks=4, sabotage=sabotage)
    prepare = attend_by_document_on_every_stage if PARALLEL["pipeline"] in flags else attend_by_document
    reference = trainer.stock(flags, ranks=ranks, prepare=prepare)
    assert_same_samples(run, reference)
    assert_same_training(run, reference)


@pytest.mark.supports("Data and loss", f"`{MASKED}`")
@pytest.mark.parametrize("rows", [2, 3])
def test_documents_of_a_row_are_kept_apart(trainer: Trainer, rows: int) -> None:
    assert_same_as_by_document(trainer, f"{GQA} {ROPE} {batch(rows)} {MASKED}")


@pytest.mark.supports("Data and loss", "supervised fine-tuning on packed conversations (`--sft`)")
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_fine_tuning_on_packed_conversations(trainer: Trainer, sft: str, rows: int) -> None:
    assert_same_as_by_document(trainer, f"{GQA} {ROPE} {batch(rows)} {sft}")


@pytest.mark.supports(
    "Data and loss",
    "packed rows under tensor and pipeline parallelism, and with full recompute",
    "the same without context parallelism",
)
@pytest.mark.parametrize(
    "parallel", [*PARALLEL.values(), pytest.param(VIRTUAL, marks=pytest.mark.slow)], ids=[*PARALLEL, "virtual"]
)
def test_packed_conversations_on_every_stage(trainer: Trainer, sft: str, parallel: str) -> None:
    assert_same_as_by_document(trainer, f"{GQA} {ROPE} {batch(3)} {sft} {parallel}", f"{cp(2)} {RECOMPUTED}", ranks=2)


@pytest.mark.slow
@pytest.mark.supports(
    "Data and loss", f"`{MASKED}` with sliding windows, learned positions, experts, several replicas, Megatron-FSDP"
)
@pytest.mark.parametrize(
    ("flags", "planned"),
    [
        (f"{GQA} {ROPE} {batch(3)} --window-size 5,0", cp(4)),
        (f"--position-embedding-type learned_absolute {batch(3)}", cp(4)),
        (f"{GQA} {ROPE} {batch(3)} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2", cp(4)),
        (f"{GQA} {ROPE} {batch(3, data_parallel=2)} --calculate-per-token-loss", cp(2)),
        (f"{GQA} {ROPE} {batch(3)}", f"{cp(4)} --use-megatron-fsdp --ckpt-format fsdp_dtensor"),
    ],
    ids=["window", "learned positions", "experts", "replicas", "sharded"],
)
def test_documents_are_kept_apart_in_other_models_and_replicas(trainer: Trainer, flags: str, planned: str) -> None:
    assert_same_as_by_document(trainer, f"{flags} {MASKED}", planned)


@pytest.mark.slow
@pytest.mark.supports("Data and loss", "`--sft` with evaluation at another B, several replicas")
@pytest.mark.parametrize(
    ("flags", "planned"),
    [
        (f"{batch(2)} --eval-micro-batch-size 3 --eval-global-batch-size 6", cp(4)),
        (batch(3, data_parallel=2), cp(2)),
    ],
    ids=["evaluation", "replicas"],
)
def test_fine_tuning_in_other_ways(trainer: Trainer, sft: str, flags: str, planned: str) -> None:
    assert_same_as_by_document(trainer, f"{GQA} {ROPE} {flags} {sft}", planned)


@pytest.mark.slow
def test_skipped_iterations_take_their_packed_samples(trainer: Trainer, sft: str) -> None:
    """Where iterations are skipped, rows come as the loader gives them, not strung together."""
    flags = f"{GQA} {ROPE} {batch(3)} {sft} --iterations-to-skip 3 4"
    reference = trainer.stock(flags, prepare=attend_by_document)
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), reference, gradients=False, steps=8)


def documents_ignored() -> None:
    from megatron_basp import sdpa

    sdpa.by_document = lambda attend, query, key, value, documents: attend(query, key, value)


def documents_of_the_first_rows() -> None:
    from megatron_basp.documents import Documents

    Documents.of_rows = lambda self, rows: self.by_row[: len(rows)]


def packs_padded_for_slices() -> None:
    from megatron.training.datasets.sft_dataset import SFTDataset

    SFTDataset.__init__ = SFTDataset.__init__.__wrapped__


def evaluation_averaged_by_rank() -> None:
    from megatron_basp.megatron import schedule

    schedule._over_groups = lambda sums, runtime: sums


@pytest.mark.slow
@pytest.mark.parametrize(
    "sabotage",
    [documents_ignored, documents_of_the_first_rows, packs_padded_for_slices, evaluation_averaged_by_rank],
)
def test_a_fault_with_packed_rows_shows_in_the_comparison(
    trainer: Trainer, sft: str, sabotage: Callable[[], None]
) -> None:
    with pytest.raises(AssertionError):
        assert_same_as_by_document(trainer, f"{GQA} {ROPE} {batch(3)} {sft}", sabotage=sabotage)


def test_a_script_that_keeps_documents_from_the_model_is_refused(trainer: Trainer) -> None:
    def sabotage() -> None:
        from megatron_basp.megatron import pretrain_gpt

        pretrain_gpt.packed_seq_params_of = lambda batch: None

    with pytest.raises(RankFailed, match="the data is packed, and the model was given no packed_seq_params"):
        trainer.planned(f"{GQA} {ROPE} {batch(2)} {MASKED} {cp(2)}", ranks=2, sabotage=sabotage)
