# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Make a small corpus of real text and a byte-level tokenizer without a download: `DIR` gets all that a config needs.

Run it as `python -m haliax_kernels.levanter.tiny_corpus DIR`, or let the launcher do so by a top-level
`tiny_corpus: DIR` in the config. The text is the Python standard library's own source code.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

CORPUS_NAME = "train.jsonl"
TOKENIZER_NAME = "tokenizer"
END_OF_TEXT = "<|endoftext|>"

_CORPUS_BYTES = 3_000_000


def make_tiny_corpus(directory: str | os.PathLike[str]) -> Path:
    """Makes `train.jsonl` and the folder `tokenizer` under `directory`, unless they are there already.

    Returns:
        The directory.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    if not (root / CORPUS_NAME).exists():
        _write_corpus(root / CORPUS_NAME)
    # `config.json` is written last: where it is, the folder is whole.
    if not (root / TOKENIZER_NAME / "config.json").exists():
        _write_tokenizer(root / TOKENIZER_NAME)
    return root


def _write_corpus(path: Path) -> None:
    partial = path.with_suffix(".partial")
    written = 0
    with partial.open("w", encoding="utf-8") as out:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            out.write(json.dumps({"text": source.read_text(encoding="utf-8", errors="replace")}) + "\n")
            written += source.stat().st_size
            if written >= _CORPUS_BYTES:
                break
    partial.replace(path)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, END_OF_TEXT])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([END_OF_TEXT])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Not by `save_pretrained`: what Transformers 5 writes, Transformers 4 cannot read.
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    # Levanter's converter reads a Hugging Face config where `model.reference_checkpoint` points, even when it trains
    # from scratch.
    end = vocabulary[END_OF_TEXT]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    _write_json(folder / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the module as a command."""
    parser = argparse.ArgumentParser(prog="python -m haliax_kernels.levanter.tiny_corpus", description=__doc__)
    parser.add_argument("directory", help=f"where {CORPUS_NAME} and the folder {TOKENIZER_NAME} go")
    print(make_tiny_corpus(parser.parse_args().directory))


if __name__ == "__main__":
    main()
