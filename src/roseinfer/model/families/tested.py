"""The model types whose checkpoints the tests compare with transformers, and what they find: docs/models.md shows it.

`tests/integration/test_transformers_models.py` asks for exactly these types and these findings.
"""

from typing import NamedTuple


class Findings(NamedTuple):
    """What the tests find of a type where transformers' modelling code computes it."""

    checkpoints: str  # as people call them
    is_capturable: bool = True  # a step reads nothing back and copies nothing from the host: a CUDA graph can hold it


TESTED = {  # by the `model_type` of config.json
    "apertus": Findings("Apertus"),
    "arcee": Findings("AFM 4.5B"),
    "bitnet": Findings("BitNet b1.58"),
    "cohere": Findings("Command R"),
    "cohere2": Findings("Command R7B, Command A"),
    "deepseek_v3": Findings("DeepSeek V3, R1", is_capturable=False),
    "ernie4_5": Findings("ERNIE 4.5, dense"),
    "ernie4_5_moe": Findings("ERNIE 4.5, mixtures", is_capturable=False),
    "exaone4": Findings("EXAONE 4"),
    "gemma": Findings("Gemma"),
    "gemma2": Findings("Gemma 2"),
    "gemma3_text": Findings("Gemma 3, text only"),
    "glm": Findings("GLM-4 9B"),
    "glm4": Findings("GLM-4 0414"),
    "glm4_moe": Findings("GLM-4.5, GLM-4.6", is_capturable=False),
    "gpt_neox": Findings("Pythia, GPT-NeoX"),
    "gpt_oss": Findings("gpt-oss", is_capturable=False),
    "granite": Findings("Granite 3, dense"),
    "granitemoe": Findings("Granite 3, mixtures", is_capturable=False),
    "helium": Findings("Helium 1"),
    "hunyuan_v1_dense": Findings("Hunyuan, dense"),
    "llama": Findings("Llama 2 and 3, and what has their shape"),
    "mistral": Findings("Mistral 7B, Ministral 8B"),
    "mixtral": Findings("Mixtral", is_capturable=False),
    "nemotron": Findings("Nemotron-4, Minitron"),
    "olmo": Findings("OLMo"),
    "olmo2": Findings("OLMo 2"),
    "olmo3": Findings("OLMo 3"),
    "olmoe": Findings("OLMoE", is_capturable=False),
    "opt": Findings("OPT"),
    "persimmon": Findings("Persimmon"),
    "phi": Findings("Phi-1.5, Phi-2"),
    "phi3": Findings("Phi-3, Phi-3.5, Phi-4"),
    "phimoe": Findings("Phi-3.5-MoE", is_capturable=False),
    "qwen2": Findings("Qwen2, Qwen2.5"),
    "qwen2_moe": Findings("Qwen1.5-MoE, Qwen2-57B-A14B", is_capturable=False),
    "qwen3": Findings("Qwen3, dense"),
    "qwen3_moe": Findings("Qwen3-30B-A3B, Qwen3-235B-A22B", is_capturable=False),
    "seed_oss": Findings("Seed-OSS"),
    "smollm3": Findings("SmolLM3"),
    "stablelm": Findings("StableLM 2"),
    "starcoder2": Findings("StarCoder2"),
}
REFUSED = {  # and what the refusal says
    "bloom": "has layers without attention over keys and values, or whose attention is their own",
    "diffllama": "computes attention more than once in a layer",
    "doge": "computes masks of its own",
    "falcon": "has attention of its own, which no other can take the place of",
    "gptj": "has attention of its own, which no other can take the place of",
    "lfm2": "has layers of conv",
    "llama4_text": "has layers of chunked_attention",
    "mamba": "has layers of linear_attention",
    "t5": "is an encoder and a decoder",
}
