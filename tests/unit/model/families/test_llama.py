"""What config.json of a Llama, Mistral, Qwen2 or Qwen3 says to the model, and what of it is refused by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import roseinfer
from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.errors import ConfigError
from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.families.llama import FamilySpec, Llama, LlamaSpec, MistralSpec, Qwen2Spec, Qwen3Spec
from roseinfer.model.families.registry import build_model, native_spec
from roseinfer.model.kernels.library import levels_here
from roseinfer.model.layers.linear import Linear
from roseinfer.model.layers.rope import normalise_rope
from roseinfer.model.runner import load_runner
from roseinfer.model.weights.checkpoint import Checkpoint
from tests.conftest import BuiltKernels
from tests.unit.model.conftest import Player, assert_same, prompt_of

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DEMO = Path(roseinfer.__file__).parent / "demo"
SPECS = (LlamaSpec, MistralSpec, Qwen2Spec, Qwen3Spec)


def spec_of(spec_type: type[FamilySpec], **fields: Any) -> FamilySpec:
    return msgspec.convert(normalise_rope(CONFIG | fields), spec_type)


def test_biases() -> None:
    biases = {
        (spec_type.model_type, wants): tuple(spec.biases)
        for spec_type in SPECS
        for wants in (False, True)
        for spec in [spec_of(spec_type, attention_bias=wants, mlp_bias=wants)]
    }
    assert biases == {
        ("llama", False): (False, False, False),
        ("llama", True): (True, True, True),
        ("mistral", False): (False, False, False),
        ("mistral", True): (False, False, False),
        ("qwen2", False): (True, False, False),
        ("qwen2", True): (True, False, False),
        ("qwen3", False): (False, False, False),
        ("qwen3", True): (True, True, False),
    }


def test_the_size_of_heads() -> None:
    assert [spec_of(spec_type).attention.head_dim for spec_type in SPECS] == [8, 8, 8, 128]
    for spec_type in SPECS:
        attention = spec_of(spec_type, head_dim=16).attention
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale) == (4, 2, 16, 0.25)
    assert spec_of(LlamaSpec, num_key_value_heads=None).attention.num_kv_heads == 4
    assert [spec_type.has_head_norms for spec_type in SPECS] == [False, False, False, True]


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("spec_type", "fields", "windows"),
    [
        (LlamaSpec, {"sliding_window": 8}, (None, None, None)),
        (MistralSpec, {"sliding_window": 8}, (8, 8, 8)),
        (MistralSpec, {"sliding_window": None}, (None, None, None)),
        (MistralSpec, {"max_position_embeddings": 8192}, (4096, 4096, 4096)),
        (MistralSpec, {"sliding_window": 64}, (None, None, None)),  # nothing is ever that far away
        (MistralSpec, {"sliding_window": 8, "layer_types": LAYER_TYPES}, (8, None, 8)),
        (MistralSpec, {"sliding_window": 8, "layer_types": None}, (8, 8, 8)),
        (MistralSpec, {"sliding_window": None, "layer_types": LAYER_TYPES}, (None, None, None)),
        (Qwen2Spec, {"sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
        (Qwen2Spec, {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (None, 8, 8)),
        (Qwen2Spec, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
        (Qwen3Spec, {"sliding_window": 8, "use_sliding_window": True, "layer_types": LAYER_TYPES}, (8, None, 8)),
        (Qwen3Spec, {"sliding_window": 8, "layer_types": LAYER_TYPES}, (None, None, None)),
    ],
)
def test_windows(spec_type: type[FamilySpec], fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_of(spec_type, **fields).attention.windows == windows


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_act": "gelu"}, "'gelu' - at `$.hidden_act`"),
        ({"num_attention_heads": 3}, "hidden_size is not an even multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads is not a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "`$.head_dim`"),
        ({"vocab_size": None}, "`$.vocab_size`"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights in the format hqq are not read"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' - at `$.rope_scaling"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types has not num_hidden_layers entries"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 3}, "at `$.layer_types[0]`"),
        (MISTRAL | {"layer_types": ["full_attention"]}, "layer_types has not num_hidden_layers entries"),
        (MISTRAL | {"layer_types": ["chunked_attention"] * 3}, "`$.layer_types[0]`"),
        (MISTRAL | {"sliding_window": 0}, "`$.sliding_window`"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], which is no word"),
        ({"is_causal": False}, "is_causal is not true: it sees the tokens behind each token too"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config is not supported"),
        ({"model_type": "granite"}, "model_type is granite, but architectures names a llama"),
        ({"architectures": ["MixtralForCausalLM"]}, "asks for MixtralForCausalLM, which is no decoder we know"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "tensor model.layers.2.input_layernorm.weight does not belong to a llama model"),
        ({"attention_bias": True}, "has no tensor model.layers.0.self_attn.q_proj.bias"),
        (
            {"num_key_value_heads": 4},
            "tensor model.layers.0.self_attn.k_proj.weight is float32 [16, 32]; config.json asks",
        ),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(write_checkpoint(tmp_path, **({"tie_word_embeddings": True} | fields)))
    assert caught.value.param == "model.path"
    assert told in caught.value.message


def write_checkpoint(directory: Path, *, has_head_norms: bool = False, **fields: Any) -> Path:
    """A Llama with tied embeddings and perhaps norms of heads, whatever the fields say."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,)}
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (32, 32) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (16, 32) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (32, 48)}
        if has_head_norms:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (8,) for name in "qk"}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | fields))
    return directory


def build(directory: Path, placement: Placement | None = None) -> CausalLM:
    with Checkpoint(directory) as checkpoint:
        return build_model(checkpoint, placement or Placement(torch.device("cpu"), torch.float32))


def test_positions_that_are_not_served_have_no_rotations(tmp_path: Path) -> None:
    """Also where the cache, and not a configured length, says how many are served."""
    whole = build(write_checkpoint(tmp_path, tie_word_embeddings=True, rope_scaling=YARN))
    assert isinstance(whole, Llama)
    assert len(whole._rotations.cos) == whole.max_positions == 128
    write_checkpoint(tmp_path, tie_word_embeddings=True, rope_scaling=YARN, max_position_embeddings=10**12)
    for length, expected in ((None, 64 * 16), (16, 16)):
        model = ModelConfig(path=str(tmp_path), max_model_len=length)
        runner = RunnerConfig(device="cpu", num_threads=1, kernels="off")
        served = load_runner(Config(model=model, cache=CacheConfig(num_blocks=64), runner=runner), 1, lambda *_: None)
        assert isinstance(served._model, Llama)
        assert len(served._model._rotations.cos) == expected
        assert torch.equal(served._model._rotations.cos[:16], whole._rotations.cos[:16])
        assert torch.equal(served._model._rotations.sin[:16], whole._rotations.sin[:16])


SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "swish"},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"attn_factor": 1.0, "finetuned": True}},
        {"architectures": ["LlamaModel"], "is_bare": True},
        {"is_bare": True, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_words_that_change_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Other names of the same, as checkpoints have them, and names of tensors as `AutoModel` saves them."""
    scaling = {"rope_scaling": YARN} if "rope_scaling" in fields else {}
    outcomes = []
    for name, given in (("plain", scaling), ("other", fields)):
        (tmp_path / name).mkdir()
        directory = write_checkpoint(tmp_path / name, **({"tie_word_embeddings": True} | given))
        if given.get("is_bare"):
            tensors = load_file(directory / "model.safetensors")
            bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
            save_file(bare, directory / "model.safetensors")
        runner = RunnerConfig(device="cpu", num_threads=1, kernels="off")
        config = Config(model=ModelConfig(path=str(directory)), cache=CacheConfig(num_blocks=64), runner=runner)
        player = Player(load_runner(config, 1, lambda *_: None), 1, 16)
        player.admit(0, prompt_of(20, seed=0, vocab_size=40))
        outcomes.append(player.run(0, 4))
    assert_same(*outcomes)


def test_without_architectures_the_model_type_decides(tmp_path: Path) -> None:
    model = build(write_checkpoint(tmp_path, tie_word_embeddings=True, architectures=None))
    assert model.model_type == "llama"
    assert (model.vocab_size, model.max_positions, model.num_parameters) == (40, 64, 40 * 32 + 32 + 3 * 7744)
    assert model.attention_spec.num_kv_heads == 2


@pytest.mark.parametrize(("family", "theta"), [({}, 10_000.0), (SMOLLM3, 2_000_000.0)], ids=["llama", "smollm3"])
@pytest.mark.parametrize("fields", [{}, {"rope_scaling": YARN}], ids=["plain", "yarn"])
def test_the_base_of_rotations_where_config_json_has_none(
    tmp_path: Path, family: dict[str, Any], theta: float, fields: dict[str, Any]
) -> None:
    with Checkpoint(write_checkpoint(tmp_path, **family | fields)) as checkpoint:
        spec = native_spec(checkpoint)
    assert isinstance(spec, FamilySpec)
    assert spec.rope.rope_theta == theta


def test_every_shape_of_linear_is_named_for_warm_up(tmp_path: Path) -> None:
    model = build(write_checkpoint(tmp_path, tie_word_embeddings=True))
    shapes = [(linear.num_outputs, linear.num_inputs) for linear in (*model.layer_linears, model.head)]
    assert shapes == [(64, 32), (32, 32), (96, 32), (32, 48), (40, 32)]


@pytest.mark.parametrize("is_gpt2", [False, True])
def test_behind_its_attention_the_last_layer_computes_the_wanted_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gpt2: bool
) -> None:
    model = build(DEMO if is_gpt2 else write_checkpoint(tmp_path, tie_word_embeddings=True))
    ids, wanted = torch.arange(12), torch.tensor([3, 11])
    groups = model.attention_spec.num_heads // model.attention_spec.num_kv_heads
    attend = lambda _layer, _q, _k, v: v.repeat_interleave(groups, 1).flatten(1)  # noqa: E731
    run, num_rows = Linear.__call__, list[int]()

    def note(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(x))
        return run(linear, x)

    monkeypatch.setattr(Linear, "__call__", note)
    with torch.inference_mode():
        expected = model.forward(ids, ids, attend)[wanted]
        num_rows.clear()
        assert torch.equal(model.forward(ids, ids, attend, wanted), expected)
    num_layers = len(model.attention_spec.windows)
    assert num_rows == [12] * (4 * num_layers - 3) + [2] * 3


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(params=["off", levels_here()[-1].name])
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "off":
        return {"kernels": "off"}
    built: BuiltKernels = request.getfixturevalue("built_kernels")
    return {"kernels": request.param, "kernels_dir": str(built(request.param))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_bits_in_chunks_and_in_company(
    tmp_path: Path, kernels: dict[str, Any], dtype: Any
) -> None:
    path = write_checkpoint(tmp_path, has_head_norms=True, **QWEN3)
    runner = RunnerConfig(device="cpu", num_threads=1, **kernels)
    config = Config(model=ModelConfig(path=str(path), dtype=dtype), cache=CacheConfig(num_blocks=64), runner=runner)
    player = Player(load_runner(config, 8, lambda *_: None), 8, 16)
    prompts = [prompt_of(50, seed=seed, vocab_size=40) for seed in range(3)]
    expected = []
    for slot, prompt in enumerate(prompts):
        player.admit(slot, prompt)
        expected.append(player.run(slot, 4))
        player.free.extend(player.sequences.pop(slot).blocks)
    for chunk in (1, 7, 16, 33):
        player.admit(3, prompts[0])
        assert_same(player.run(3, 4, chunk), expected[0])
        player.free.extend(player.sequences.pop(3).blocks)
    for slot, prompt in enumerate(prompts):
        player.admit(slot, prompt)
    together = [player.step({0: 50, 1: 3}), player.step({0: 1, 1: 47, 2: 50})]
    together += [player.step({0: 1, 1: 1, 2: 1}) for _ in range(3)]
    for slot, outcomes in enumerate(expected):
        assert_same([step[slot] for step in together if slot in step][:4], outcomes)
