"""Trains a byte-level BPE on the documents, encodes them, and writes the tokenizer with its chat template.

Text is encoded with special tokens switched off: a role marker that a page quotes is text, and only the role of a turn
becomes a marker.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from demo_model.corpus import Document

END = "<|endoftext|>"
ROLES = ("system", "user", "assistant")
MARKERS = {role: f"<|{role}|>" for role in ROLES}
SPECIALS = [END, *MARKERS.values()]
END_ID = SPECIALS.index(END)  # the trainer numbers special tokens first, in their order
_CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens: the specials first, then all 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for document in documents for _, text in document.turns), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: too little text")
    return tokenizer


def encode(tokenizer: Tokenizer, document: Document) -> list[int]:
    """The document's ids: a marker before each turn with a role, the end mark after each answer and at the end."""
    tokenizer.encode_special_tokens = True  # markers inside the text are text
    ids: list[int] = []
    for role, text in document.turns:
        if role:
            ids.append(SPECIALS.index(MARKERS[role]))
        ids += tokenizer.encode(text).ids
        if role in ("", "assistant"):
            ids.append(END_ID)
    return ids


@dataclass(frozen=True, slots=True)
class Streams:
    """The corpus as token ids, int64 [tokens] each, and the tokenizer trained on the first of the two."""

    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor
    held_out_bytes_per_token: float


def streams(documents: Sequence[Document], vocab_size: int, seed: int) -> Streams:
    """Documents shuffled and joined, the ones to train on in all their copies."""
    learnt = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    tokenizer = train_tokenizer(learnt, vocab_size)
    weighted = [document for document in learnt for _ in range(document.copies)]
    order = torch.randperm(len(weighted), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out_ids = _joined(tokenizer, held_out)
    return Streams(
        tokenizer=tokenizer,
        train=_joined(tokenizer, (weighted[index] for index in order)),
        held_out=held_out_ids,
        held_out_bytes_per_token=sum(document.num_bytes for document in held_out) / len(held_out_ids),
    )


def _joined(tokenizer: Tokenizer, documents: Iterable[Document]) -> Tensor:
    return torch.tensor([token_id for document in documents for token_id in encode(tokenizer, document)])


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, as `transformers` reads them."""
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE.read_text(encoding="utf-8"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
