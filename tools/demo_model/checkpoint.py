"""Writes and reads the network as the files that Hugging Face's loaders read."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from demo_model.network import Gpt2, Shape

_WEIGHTS = "model.safetensors"


def write(model: Gpt2, folder: Path, end_id: int) -> None:
    """Write `model.safetensors` (bfloat16), `config.json` and `generation_config.json`."""
    (folder / _WEIGHTS).write_bytes(save(model.checkpoint(), metadata={"format": "pt"}))  # save_file writes it private
    _write_json(folder / "config.json", _config(model.shape, end_id))
    _write_json(folder / "generation_config.json", {"bos_token_id": end_id, "eos_token_id": end_id})


def read(folder: Path, shape: Shape) -> Gpt2:
    """The network as saved, rounded to bfloat16 and held in float32."""
    model = Gpt2(shape)
    model.load_checkpoint(load_file(folder / _WEIGHTS))
    return model.eval()


def _config(shape: Shape, end_id: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": shape.vocab_size,
        "n_positions": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
