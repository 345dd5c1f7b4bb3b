"""The model families by the architecture that config.json names.

An architecture without a row here runs transformers' modelling code (transformers.py). To add a file for one, write
`families/<name>.py` with a class of `CausalLM` (gpt2.py is the shortest), and add its row to `_FAMILIES`. A family that
differs from Llama in biases, norms of heads or windows is a spec in llama.py and a row. Then add a configuration to
tests/integration/test_parity.py, which compares it with transformers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from roseinfer.model.checkpoint import Checkpoint
from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.families.gpt2 import GPT2
from roseinfer.model.families.llama import Llama, LlamaSpec, MistralSpec, Qwen2Spec, Qwen3Spec

_Constructor = Callable[[dict[str, Any], Checkpoint, Placement], CausalLM]
_FAMILIES: dict[str, tuple[str, _Constructor]] = {  # architecture: (model_type, which stands for it, class)
    "GPT2LMHeadModel": ("gpt2", GPT2),
    "LlamaForCausalLM": ("llama", partial(Llama, LlamaSpec)),
    "MistralForCausalLM": ("mistral", partial(Llama, MistralSpec)),
    "Qwen2ForCausalLM": ("qwen2", partial(Llama, Qwen2Spec)),
    "Qwen3ForCausalLM": ("qwen3", partial(Llama, Qwen3Spec)),
}


def build_model(checkpoint: Checkpoint, placement: Placement) -> CausalLM:
    """Read the checkpoint's weights into the model that its config.json names. Raises ConfigError for an unknown one.

    The first known entry of `architectures` counts; without any, `model_type`.
    """
    config = checkpoint.config
    named = config.get("architectures") or []
    by_type = {model_type: architecture for architecture, (model_type, _) in _FAMILIES.items()}
    known = [name for name in named or [by_type.get(str(config.get("model_type")))] if name in _FAMILIES]
    if not known:
        from roseinfer.model.families.transformers import TransformersModel  # which takes seconds to import

        return TransformersModel(checkpoint, placement)
    _, construct = _FAMILIES[known[0]]
    return construct(config, checkpoint, placement)
