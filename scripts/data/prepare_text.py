"""Text files to a data set that Megatron trains on; see --help."""

import argparse
import sys
from pathlib import Path

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.text_dataset import prepare_text_dataset
from megatron_basp.text_files import sample_texts
from megatron_basp.tokenizer import train_tokenizer

DESCRIPTION = """\
Tokenize text into PREFIX.bin and PREFIX.idx, the pair that Megatron's --data-path names.

A .jsonl file holds one document a line, as {"text": "..."}; any other file is one document, or is cut into several
with --document-bytes. All of it is UTF-8.
Documents keep the order given, and Megatron's --split cuts by document: shuffle them where the order means something.
Interrupted, the same command continues; repeated with nothing changed, it does nothing.
"""
EXAMPLE = """\
examples:
  a tokenizer of 8192 tokens, trained on the first 3 MB of the text itself:
    .venv/bin/python scripts/data/prepare_text.py corpus/*.jsonl --output data/corpus --vocab-size 8192
  the tokenizer of a model that lies on this machine:
    .venv/bin/python scripts/data/prepare_text.py corpus/*.jsonl --output data/corpus --tokenizer models/qwen2.5-3b

The flags for Megatron are printed at the end.
"""


def main() -> int:
    """Return 0, or 2 after a one-line message on bad input."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text, or JSONL if it ends in .jsonl")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="results, without .bin and .idx")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a Hugging Face tokenizer folder")
    choice.add_argument(
        "--vocab-size", type=int, default=4096, metavar="N", help="or train one, PREFIX-tokenizer (default 4096)"
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help='where JSONL has its text (default "text")')
    parser.add_argument(
        "--document-bytes",
        type=int,
        metavar="N",
        help="cut plain text at line ends into documents of about N bytes: --split needs a document for each part",
    )
    options = parser.parse_args()
    if options.document_bytes is not None and options.document_bytes < 1:
        parser.error(f"--document-bytes must be 1 or more, got {options.document_bytes}")
    try:
        tokenizer_folder = options.tokenizer or train_tokenizer(
            sample_texts(options.files, json_key=options.json_key),
            Path(f"{options.output}-tokenizer"),
            options.vocab_size,
        )
        dataset = prepare_text_dataset(
            options.files,
            options.output,
            tokenizer_folder,
            json_key=options.json_key,
            document_bytes=options.document_bytes,
        )
    except (ConfigurationError, OSError) as error:
        print(f"prepare_text.py: {error}", file=sys.stderr)
        return 2
    print(*dataset.megatron_flags())
    return 0


if __name__ == "__main__":
    sys.exit(main())
