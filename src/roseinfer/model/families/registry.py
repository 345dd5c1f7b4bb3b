"""The model families by the architecture that config.json names.

An architecture without a row here runs transformers' modelling code (transformers.py). To add a file for one, write
`families/<name>.py` with a class of `CausalLM` (gpt2.py is the shortest), and add its row to `FAMILIES`. A family that
differs from Llama in biases, norms of heads, windows, multipliers or rotations is a spec in llama.py and a row. Then
add a configuration to tests/integration/test_parity.py, which compares it with transformers.
"""

from typing import Any, NamedTuple

from roseinfer.errors import ConfigError
from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import CausalLM, read_spec
from roseinfer.model.families.gpt2 import GPT2, GPT2Spec
from roseinfer.model.families.llama import (
    FamilySpec,
    GraniteSpec,
    Llama,
    LlamaSpec,
    MistralSpec,
    Qwen2Spec,
    Qwen3Spec,
    SeedOssSpec,
    SmolLM3Spec,
)
from roseinfer.model.families.tested import TESTED
from roseinfer.model.layers.rope import DEFAULT_THETA, normalise_rope
from roseinfer.model.weights.checkpoint import Checkpoint


class _Family(NamedTuple):
    """A file of ours, and the fields of config.json that it reads."""

    model_type: str  # which stands for the architecture
    model: Any  # of a spec, a checkpoint and a placement
    spec: type[GPT2Spec] | type[FamilySpec]
    bare: str  # the architecture without a head
    theta: float = DEFAULT_THETA  # of rotations, where config.json has none


FAMILIES = {  # by architecture
    "GPT2LMHeadModel": _Family("gpt2", GPT2, GPT2Spec, "GPT2Model"),
    "GraniteForCausalLM": _Family("granite", Llama, GraniteSpec, "GraniteModel"),
    "LlamaForCausalLM": _Family("llama", Llama, LlamaSpec, "LlamaModel"),
    "MistralForCausalLM": _Family("mistral", Llama, MistralSpec, "MistralModel"),
    "Qwen2ForCausalLM": _Family("qwen2", Llama, Qwen2Spec, "Qwen2Model"),
    "Qwen3ForCausalLM": _Family("qwen3", Llama, Qwen3Spec, "Qwen3Model"),
    "SeedOssForCausalLM": _Family("seed_oss", Llama, SeedOssSpec, "SeedOssModel"),
    "SmolLM3ForCausalLM": _Family("smollm3", Llama, SmolLM3Spec, "SmolLM3Model", 2_000_000.0),
}


def native_spec(checkpoint: Checkpoint) -> GPT2Spec | FamilySpec | None:
    """What a file of ours reads of config.json; None where there is no such file. Raises ConfigError."""
    family = _find(checkpoint)
    if family is None:
        return None
    _check_kind(family, checkpoint)
    return read_spec(normalise_rope(checkpoint.config, family.theta), family.spec, checkpoint)


def build_model(checkpoint: Checkpoint, placement: Placement) -> CausalLM:
    """Read the checkpoint's weights into the model that its config.json names. Raises ConfigError."""
    family, spec = _find(checkpoint), native_spec(checkpoint)
    if family is None:
        from roseinfer.model.families.transformers import TransformersModel  # which takes seconds to import

        return TransformersModel(checkpoint, placement)
    model: CausalLM = family.model(spec, checkpoint, placement)
    return model


def _check_kind(family: _Family, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where config.json asks for another model than the family's, whatever its fields are."""
    config, reason = checkpoint.config, None
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        reason = f"model_type is {model_type!r}, which is no word"
    elif model_type != family.model_type and model_type in TESTED:
        reason = f"model_type is {model_type}, but architectures names a {family.model_type}"
    elif not config.get("is_causal", True):  # as of Qwen2 that was trained for embeddings
        reason = "is_causal is not true: it sees the tokens behind each token too, which cannot be served"
    elif config.get("per_layer_config") is not None:
        reason = "per_layer_config is not supported: all layers are of one shape"
    if reason is not None:
        raise ConfigError(f"{checkpoint.directory}/config.json: {reason}.", param="model.path")


def _find(checkpoint: Checkpoint) -> _Family | None:
    """By the first known entry of `architectures`, or its model without a head; without any, by `model_type`."""
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    named = checkpoint.architectures or [by_type.get(str(checkpoint.config.get("model_type")), "")]
    bare = {family.bare: family for family in FAMILIES.values()}
    return next((family for name in named if (family := FAMILIES.get(name) or bare.get(name))), None)
