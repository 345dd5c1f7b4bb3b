"""An architecture's name into the class that computes it. Adding a family is a file and a line here."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec
from roseinfer.model.checkpoint import Checkpoint
from roseinfer.model.families.gpt2 import GPT2
from roseinfer.model.families.llama import Llama, LlamaSpec, MistralSpec, Qwen2Spec, Qwen3Spec
from roseinfer.model.kv_cache import CacheShape
from roseinfer.model.layers.embedding import Linear, Placement


class CausalLM(Protocol):
    """What the runner needs of a model: rows in, rows out, and the shapes around it."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def attention_spec(self) -> AttentionSpec: ...

    @property
    def cache_shape(self) -> CacheShape: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def layer_linears(self) -> list[Linear]:
        """Linears run with one row a token, at least one of each shape."""

    @property
    def head(self) -> Linear:
        """The linear run with one row a sampled token."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Ids and positions [tokens] -> hidden rows [tokens, width]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [rows, width] -> logits [rows, vocab_size]: float32, or bfloat16 where linears give only that.

        Those of plain torch and of oneDNN give the type of the weights, so on CUDA it is bfloat16 as a rule.
        """


_Constructor = Callable[[dict[str, Any], Checkpoint, Placement], CausalLM]
_ARCHITECTURES: dict[str, _Constructor] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": partial(Llama, LlamaSpec),
    "MistralForCausalLM": partial(Llama, MistralSpec),
    "Qwen2ForCausalLM": partial(Llama, Qwen2Spec),
    "Qwen3ForCausalLM": partial(Llama, Qwen3Spec),
}
_MODEL_TYPES = {  # for configurations that name no architecture
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def build_model(checkpoint: Checkpoint, placement: Placement) -> CausalLM:
    """Read the checkpoint's weights into the model its configuration names. Raises ConfigError when it names none."""
    config = checkpoint.config
    named = config.get("architectures") or []
    known = [name for name in named or [_MODEL_TYPES.get(str(config.get("model_type")))] if name in _ARCHITECTURES]
    if not known:
        raise ConfigError(
            f"{checkpoint.directory}/config.json asks for {', '.join(map(str, named)) or config.get('model_type')}; "
            f"known architectures are {', '.join(_ARCHITECTURES)}.",
            param="model.path",
        )
    return _ARCHITECTURES[known[0]](config, checkpoint, placement)
