"""Documents into token ids: a byte-level BPE trained on them, and the chat template that its role markers serve.

Knows nothing about the network. Text is encoded with special tokens switched off, so that a page which quotes a marker
is text, and only a turn's role becomes one.
"""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.corpus import Document

END = "<|endoftext|>"
ROLES = ("system", "user", "assistant")
MARKERS = {role: f"<|{role}|>" for role in ROLES}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
{%- if role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('roseinfer-demo knows the roles system, developer, user and assistant, not ' + role) -}}
{%- endif -%}
{{- '<|' + role + '|>' + message['content'] -}}
{%- if role == 'assistant' -%}{{- '<|endoftext|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens: the specials first, then all 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, *MARKERS.values()],
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
    end = tokenizer.token_to_id(END)
    ids: list[int] = []
    for role, text in document.turns:
        if role:
            ids.append(tokenizer.token_to_id(MARKERS[role]))
        ids += tokenizer.encode(text).ids
        if role in ("", "assistant"):
            ids.append(end)
    return ids


def stream(tokenizer: Tokenizer, documents: Sequence[Document], seed: int) -> torch.Tensor:
    """All documents, in all their copies, shuffled and joined: int64 [tokens]."""
    weighted = [document for document in documents for _ in range(document.copies)]
    random.Random(seed).shuffle(weighted)
    return torch.tensor([token_id for document in weighted for token_id in encode(tokenizer, document)])


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
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
