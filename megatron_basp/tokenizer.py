"""Hugging Face tokenizer folders: train one, load one, tell one from another."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_basp.atomic_files import flush, locked, read_json, write_json
from megatron_basp.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json")


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int = 4096) -> Path:
    """Train a byte-level byte-pair tokenizer (as GPT-2's) into a Hugging Face folder, and return the folder.

    Decoding gives back any text exactly. A folder is complete or not there, and one that was trained on the same
    texts is left as it is. `texts` are held in memory; `vocab_size` is an upper bound, short texts yield less.

    Raises:
        ConfigurationError: no text, a vocabulary too small for bytes, or a folder with files of another origin.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, record, work = list(texts), folder / "trained_on.json", Path(f"{folder}.parts")
    # Padding has its own token: Megatron pads short samples with it, and masks the loss wherever it meets it.
    special_tokens, alphabet = [END_OF_DOCUMENT, PADDING], pre_tokenizers.ByteLevel.alphabet()
    smallest = len(special_tokens) + len(alphabet)
    if vocab_size < smallest:
        raise ConfigurationError(f"vocabulary size {vocab_size}: a byte-level tokenizer takes at least {smallest}")
    if not any(texts):
        raise ConfigurationError(f"{folder}: no text to train the tokenizer on")
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    inputs = {"texts_sha256": digest.hexdigest(), "vocab_size": vocab_size}

    with locked(folder):
        if read_json(record) == inputs:
            return folder
        if folder.exists() and not record.exists() and any(folder.iterdir()):
            raise ConfigurationError(f"{folder}: holds files of another origin; use it as it is, or name a new folder")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        shutil.rmtree(work, ignore_errors=True)
        (work / "new").mkdir(parents=True)
        tokenizer.save(f"{work}/new/tokenizer.json")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # known to transformers 4 and 5, unlike what 5 would write
            "eos_token": END_OF_DOCUMENT,
            "pad_token": PADDING,
            "clean_up_tokenization_spaces": False,  # else decoding drops spaces before punctuation
        }
        write_json(work / "new" / "tokenizer_config.json", config)
        write_json(work / "new" / record.name, inputs)
        flush(*(work / "new").iterdir())
        if folder.exists():
            folder.rename(work / "old")
        (work / "new").rename(folder)
        flush(folder.parent)
        shutil.rmtree(work)
    return folder


def tokenizer_sha256(folder: Path) -> str:
    """One hash for the files of a folder that define its tokenizer.

    Raises:
        ConfigurationError: there are none.
    """
    files = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not files:
        raise ConfigurationError(f"{folder}: no tokenizer here; it takes a Hugging Face folder with a tokenizer.json")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `folder`, set to encode a text as it is: no special tokens read in it, none cut or padded.

    Raises:
        ConfigurationError: it does not load, is not a "fast" one, or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: the tokenizer does not load: {str(error).splitlines()[0]}") from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ConfigurationError(f'{folder}: it takes a "fast" tokenizer with an eos_token to end documents with')
    encoder = tokenizer.backend_tokenizer
    encoder.encode_special_tokens = True
    encoder.no_truncation()  # a tokenizer.json may ask for either
    encoder.no_padding()
    return cast("PreTrainedTokenizerFast", tokenizer)
