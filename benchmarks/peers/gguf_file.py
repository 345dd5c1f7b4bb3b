"""Writes a checkpoint of Qwen3's architecture as a GGUF file in bfloat16, for llama.cpp.

    python -m benchmarks.peers.gguf_file MODEL_DIR OUT.gguf

Needs the environment of llama.cpp. llama.cpp's own converter knows tokenizers by a digest, and not those of random
checkpoints; `llama-quantize` makes q8_0 and q4_0 of this file.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]  # the environment of llama.cpp has it
import numpy as np
from numpy.typing import NDArray

BF16 = gguf.GGMLQuantizationType.BF16
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",  # absent where embeddings are the head
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(name: str) -> str:
    """llama.cpp's name of a tensor. Raises KeyError for one of another architecture."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{IN_LAYER[rest.removesuffix('.weight')]}.weight"


def read_tensors(file: Path) -> dict[str, NDArray[np.uint16]]:
    """The tensors of a safetensors file in bfloat16, as their bits."""
    content = np.memmap(file, np.uint8, "r")
    length = int(content[:8].view(np.uint64)[0])
    header = json.loads(content[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = content[begin:end].view(np.uint16).reshape(entry["shape"])
    return tensors


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: Any, directory: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | added
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(config["vocab_size"])), "an id has no token"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in added else normal for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(arguments.out), "qwen3")
    writer.add_name(arguments.model.name)
    add_shape(writer, config)
    add_tokenizer(writer, arguments.model, config)
    for name, bits in read_tensors(arguments.model / "model.safetensors").items():
        if bits.ndim == 1:  # norms are in float32
            writer.add_tensor(name_of(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(
                name_of(name), bits.view(np.uint8), raw_shape=(*bits.shape[:-1], 2 * bits.shape[-1]), raw_dtype=BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
