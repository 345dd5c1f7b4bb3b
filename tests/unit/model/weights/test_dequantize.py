"""Quantised checkpoints: the weights that each format means, in one tensor and in a whole model; and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roseinfer.config.options import Config, ModelConfig, RunnerConfig
from roseinfer.errors import ConfigError
from roseinfer.model.device import Placement, Quantization
from roseinfer.model.families.causal_lm import CausalLM, LayerReader
from roseinfer.model.families.registry import build_model
from roseinfer.model.loading import load_model
from roseinfer.model.weights.checkpoint import Checkpoint
from tests.unit.model.conftest import Shape
from tests.unit.model.conftest import write_checkpoint as write_gpt2
from tests.unit.model.families.test_llama import write_checkpoint as write_llama
from tests.unit.model.quantised import Method, awq, compressed, gptq, methods, mxfp4, of_module, quantise, write

METHODS = methods(group=32, block=24)
WIDTHS = [(64, 96), (48, 80), (1048, 64), (56, 16)]  # outputs and inputs; not all are whole groups or blocks


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """With rows that have zeros at the ends of their range, which are stored in another way than others."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
    weight[1::5], weight[2::5] = weight[1::5].abs(), -weight[2::5].abs()
    return weight


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_a_weight_is_what_its_format_means(tmp_path: Path, method: Method, shape: tuple[int, int]) -> None:
    parts, expected = method.store(random_weight(*shape))
    with Checkpoint(write(tmp_path, of_module("a.b", parts), method.config)) as checkpoint:
        assert "a.b.weight" in checkpoint.names
        weight = checkpoint.tensor("a.b.weight", shape)
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected)
        checkpoint.check_all_read(ignored=())


def logits_of(directory: Path) -> torch.Tensor:
    with Checkpoint(directory) as checkpoint:
        return logits_with(build_model(checkpoint, Placement(torch.device("cpu"), torch.float32)))


def logits_with(model: CausalLM) -> torch.Tensor:
    """Of a sequence that attends to itself alone: what is compared is the weights."""
    ids = torch.arange(1, 12)
    groups = model.attention_spec.num_heads // model.attention_spec.num_kv_heads
    return model.logits(model.forward(ids, ids, lambda _, q, k, v: v.repeat_interleave(groups, 1).flatten(1)))


@pytest.mark.parametrize("method", methods(group=16, block=24), ids=str)
def test_a_whole_model_computes_as_with_the_floats(tmp_path: Path, method: Method) -> None:
    """Queries, keys and values are three modules of the file and one of the model."""
    (tmp_path / "llama").mkdir()
    llama = write_llama(tmp_path / "llama", tie_word_embeddings=True)
    quantised, floats = quantise(llama, method, ("proj.weight",))
    assert torch.equal(logits_of(quantised), logits_of(floats))
    assert not torch.equal(logits_of(quantised), logits_of(llama))


@pytest.mark.parametrize("store", [gptq, awq])
def test_a_packed_gpt2_has_weights_that_lie_as_in_its_float_form(tmp_path: Path, store: Any) -> None:
    """Its float weights are [inputs, outputs], which a square one does not show."""
    method = next(method for method in methods(group=16, block=24) if method.name == store.__name__)
    gpt2 = write_gpt2(tmp_path / "gpt2", Shape())
    quantised, floats = quantise(gpt2, method, ("c_attn.weight", "c_proj.weight", "c_fc.weight"), are_inputs_first=True)
    assert torch.equal(logits_of(quantised), logits_of(floats))


FORMATS = {method.name: method for method in methods(group=16, block=24)}


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "gptq, zeros"), ("quant_config.json", "awq")])
def test_a_configuration_beside_config_json(tmp_path: Path, file: str, name: str) -> None:
    """As the formats' first tools wrote it, without the name of the method."""
    parts, expected = FORMATS[name].store(random_weight(64, 96))
    fields = {key: value for key, value in FORMATS[name].config.items() if key not in ("quant_method", "bits")}
    write(tmp_path, of_module("a", parts), None)
    renamed = {"q_group_size": fields.pop("group_size"), "w_bit": 4} if name == "awq" else {}
    (tmp_path / file).write_text(json.dumps(fields | renamed))
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)


def test_modelopt_s_configuration_beside_config_json(tmp_path: Path) -> None:
    parts, expected = FORMATS["fp8, a scale each"].store(random_weight(64, 96))
    write(tmp_path, of_module("a", parts), None)
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": section})
    )
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)


@pytest.mark.parametrize("beside", [True, False])
def test_modelopt_may_have_quantised_a_cache_alone(tmp_path: Path, beside: bool) -> None:
    section = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    weight = random_weight(64, 96)
    write(
        tmp_path,
        {"a.weight": weight, "a.k_scale": torch.ones(1)},
        None if beside else section | {"quant_method": "modelopt"},
    )
    if beside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), weight)
        checkpoint.check_all_read(ignored=())


def test_zeros_that_are_not_packed_as_the_numbers_are(tmp_path: Path) -> None:
    """As the first versions of compressed-tensors wrote them, each in a byte with its sign."""
    method = FORMATS["compressed-tensors, W4A16, zeros"]
    parts, expected = method.store(random_weight(64, 96))
    words = parts["weight_zero_point"].t().contiguous().view(torch.uint8)
    zeros = torch.stack([words & 15, words >> 4], dim=-1).flatten(1).t()
    parts["weight_zero_point"] = (zeros.int() - 8).to(torch.int8)
    with Checkpoint(write(tmp_path, of_module("a", parts), method.config)) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)


@pytest.mark.parametrize("name", ["fp8, a scale each", "fp8, blocks"])
def test_fp8_scales_of_gptqmodel_are_divided_by(tmp_path: Path, name: str) -> None:
    parts, expected = FORMATS[name].store(random_weight(64, 96))
    scale = parts.pop("weight_scale_inv" if name == "fp8, blocks" else "weight_scale")
    parts["weight_scale_inv"] = 1 / scale
    config = FORMATS[name].config | {"format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
    with Checkpoint(write(tmp_path, of_module("a", parts), config)) as checkpoint:
        torch.testing.assert_close(checkpoint.tensor("a.weight", (64, 96)), expected, rtol=1e-6, atol=0)


def test_the_section_has_another_name_in_the_first_files_of_compressed_tensors(tmp_path: Path) -> None:
    method = FORMATS["compressed-tensors, W4A16"]
    parts, expected = method.store(random_weight(64, 96))
    with Checkpoint(write(tmp_path, of_module("a", parts), None, compression_config=method.config)) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)


def test_a_packed_weight_that_does_not_say_its_shape(tmp_path: Path) -> None:
    parts, expected = FORMATS["compressed-tensors, W4A16"].store(random_weight(64, 96))
    del parts["weight_shape"]
    with Checkpoint(write(tmp_path, of_module("a", parts), FORMATS["compressed-tensors, W4A16"].config)) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)


def test_a_packed_weight_of_which_nothing_says_the_shape(tmp_path: Path) -> None:
    parts, _ = FORMATS["compressed-tensors, W4A16"].store(random_weight(64, 96))
    del parts["weight_shape"]
    config = FORMATS["compressed-tensors, W4A16"].config | {"config_groups": {}}
    checkpoint = Checkpoint(write(tmp_path, of_module("a", parts), config))
    with checkpoint, pytest.raises(ConfigError, match="neither a weight_shape nor config_groups says"):
        checkpoint.tensor("a.weight", (64, 96))


def test_a_block_structure_in_words(tmp_path: Path) -> None:
    """As the first versions of compressed-tensors wrote it."""
    method = FORMATS["compressed-tensors, fp8, blocks"]
    parts, expected = method.store(random_weight(64, 96))
    config = compressed("float-quantized", type="float", strategy="block", block_structure="24x24")
    with Checkpoint(write(tmp_path, of_module("a", parts), config)) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)


def test_float_modules_lie_beside_quantised_ones(tmp_path: Path) -> None:
    """As `ignore` and `modules_to_not_convert` list them: what a module is, its tensors say."""
    parts, expected = FORMATS["gptq"].store(random_weight(64, 96))
    floats = random_weight(64, 96, seed=1).half()
    with Checkpoint(
        write(tmp_path, of_module("a", parts) | {"b.weight": floats}, FORMATS["gptq"].config)
    ) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight", (64, 96)), expected)
        assert torch.equal(checkpoint.tensor("b.weight", (64, 96)), floats)


@pytest.mark.parametrize("part", ["input_scale", "activation_scale", "k_scale", "kv_scale"])
def test_scales_of_activations_and_caches_are_passed_over(tmp_path: Path, part: str) -> None:
    parts, _ = FORMATS["fp8, a scale each"].store(random_weight(64, 96))
    tensors = of_module("a", parts) | {f"a.{part}": torch.ones(1)}
    with Checkpoint(write(tmp_path, tensors, FORMATS["fp8, a scale each"].config)) as checkpoint:
        checkpoint.tensor("a.weight", (64, 96))
        checkpoint.check_all_read(ignored=())
    with Checkpoint(write(tmp_path, tensors, None)) as checkpoint, pytest.raises(ConfigError, match="does not belong"):
        checkpoint.check_all_read(ignored=("weight", "weight_scale"))


def test_a_bias_that_autogptq_made_up_is_passed_over_if_it_is_zeros(tmp_path: Path) -> None:
    parts, _ = FORMATS["gptq"].store(random_weight(64, 96))
    tensors = of_module("a", parts) | {"a.bias": torch.zeros(64)}
    for bias in (0, 1):
        tensors["a.bias"][5] = bias
        with Checkpoint(write(tmp_path, tensors, FORMATS["gptq"].config)) as checkpoint:
            checkpoint.tensor("a.weight", (64, 96))
            if bias:
                with pytest.raises(ConfigError, match=r"tensor a\.bias does not belong"):
                    checkpoint.check_all_read(ignored=())
            else:
                checkpoint.check_all_read(ignored=())


def test_a_part_that_no_module_reads_is_named(tmp_path: Path) -> None:
    parts, _ = FORMATS["gptq"].store(random_weight(64, 96))
    tensors = of_module("a", parts) | {"stranger.qweight": parts["qweight"].clone()}
    with Checkpoint(write(tmp_path, tensors, FORMATS["gptq"].config)) as checkpoint:
        checkpoint.tensor("a.weight", (64, 96))
        with pytest.raises(ConfigError, match=r"tensor stranger\.qweight does not belong"):
            checkpoint.check_all_read(ignored=())


def test_packed_matrices_count_as_what_they_hold(tmp_path: Path) -> None:
    """It is asked how many threads a model is worth."""
    parts, _ = FORMATS["compressed-tensors, W4A16"].store(random_weight(64, 96))
    with Checkpoint(write(tmp_path, of_module("a", parts), FORMATS["compressed-tensors, W4A16"].config)) as checkpoint:
        assert checkpoint.num_matrix_elements == 64 * 96 + 64 * 6  # and the scales


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights in the format bitsandbytes are not read"),
        (
            {"quant_method": "HQQ"},
            "format hqq are not read; take the model without quantisation, or as FP8, compressed",
        ),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "format gptq marlin are not read"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "format gptq marlin are not read"),
        ({"quant_method": "awq", "version": "GEMV"}, "format awq gemv are not read"),
        ({"quant_method": "awq", "version": None, "format": "gemv_fast"}, "format awq gemv_fast are not read"),
        ({"quant_method": "gptq", "bits": 3}, "format gptq 3 bits are not read"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "format gptq rotated are not read"),
        ({"quant_method": "awq", "spinquant_config": {"r1": True}}, "format awq rotated are not read"),
        ({"quant_method": "fp8", "rotation_config": {"block_size": 32}}, "format fp8 rotated are not read"),
        ({"quant_method": "awq", "bits": 8}, "format awq 8 bits are not read"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "format modelopt NVFP4 are not read"),
        (compressed("nvfp4-pack-quantized"), "format compressed-tensors nvfp4-pack-quantized are not read"),
        (compressed("pack-quantized", num_bits=7), "format compressed-tensors 7 bits are not read"),
        (compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask are not read"),
        (compressed("dense") | {"transform_config": {"config_groups": {"R1": {}}}}, "tensors transforms are not read"),
        ({"quant_method": "fp8", "weight_block_size": "all"}, "`$.weight_block_size`"),
        ({"bits": 4}, "`quant_method` is missing"),
        ({"quant_method": None}, "`quant_method` is missing"),
        ([], "Expected `object`, got `array`"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(tmp_path: Path, quantization: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoint(write(tmp_path, {"a": torch.ones(1)}, quantization))
    assert caught.value.param == "model.path"
    assert told in caught.value.message
    assert "\n" not in caught.value.message


ONES = torch.ones(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("told", "name", "change"),
    [
        ("there is no scales", "gptq", {"scales": None}),
        ("there is no g_idx", "gptq, order", {"g_idx": None}),
        ("there is no weight_zero_point", "compressed-tensors, W4A16, zeros", {"weight_zero_point": None}),
        ("there is no weight_zero_point", "compressed-tensors, W8A8, zeros", {"weight_zero_point": None}),
        ("there is no weight_g_idx", "compressed-tensors, W4A16, order", {"weight_g_idx": None}),
        ("12 words for 104 numbers are not 2, 4 or 8 bits each", "gptq", {"g_idx": ONES.expand(104)}),
        ("104 inputs in groups of 16 are not 6 groups", "gptq", {"qweight": ONES.expand(13, 64)}),
        ("packed in torch.int16, not int32", "gptq", {"qweight": ONES.expand(12, 64).short()}),
        ("9 words for 64 numbers are not 4 bits each", "gptq", {"qzeros": ONES.expand(6, 9)}),
        ("columns in other groups than its 6", "gptq", {"g_idx": ONES.expand(96) * 6}),
        ("96 inputs in groups of 16 are not 5 groups", "gptq", {"scales": torch.ones(5, 64)}),
        ("cannot be dequantised", "gptq", {"scales": torch.ones(6)}),
        ("not of one weight", "awq", {"scales": torch.ones(6, 65)}),
        ("[3, 5] scales do not fit the blocks", "fp8, blocks", {"weight_scale_inv": torch.ones(3, 5)}),
        ("it is torch.float32 and has scales", "fp8, blocks", {"weight": torch.ones(64, 96)}),
        ("[64, 7] scales do not fit", "compressed-tensors, W4A16", {"weight_scale": torch.ones(64, 7)}),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, told: str, name: str, change: dict[str, torch.Tensor | None]) -> None:
    parts, _ = FORMATS[name].store(random_weight(64, 96))
    left = {part: tensor for part, tensor in (parts | change).items() if tensor is not None}
    with Checkpoint(write(tmp_path, of_module("a", left), FORMATS[name].config)) as checkpoint:
        with pytest.raises(ConfigError, match=r"a\.weight cannot be dequantised") as caught:
            checkpoint.tensor("a.weight", (64, 96))
        assert told in caught.value.message


def test_a_weight_of_another_shape_than_the_model_has(tmp_path: Path) -> None:
    parts, _ = FORMATS["awq"].store(random_weight(64, 96))
    checkpoint = Checkpoint(write(tmp_path, of_module("a", parts), FORMATS["awq"].config))
    with checkpoint, pytest.raises(ConfigError, match=r"a\.weight is float32 \[64, 96\]; config.*\[96, 64\]"):
        checkpoint.tensor("a.weight", (96, 64))


def test_mxfp4_experts(tmp_path: Path) -> None:
    """All experts of a layer are one tensor, which has no `weight` in its name."""
    parts, expected = mxfp4(random_weight(5 * 64, 40).view(5, 64, 40))
    tensors = {f"experts.down_proj{part}": tensor for part, tensor in parts.items()}
    with Checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"})) as checkpoint:
        assert checkpoint.names == {"experts.down_proj"}
        assert torch.equal(checkpoint.tensor("experts.down_proj").float(), expected)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_it_becomes_what_the_configuration_says(tmp_path: Path, quantization: Quantization) -> None:
    llama = tmp_path / "llama"
    llama.mkdir()
    quantised, floats = quantise(write_llama(llama, tie_word_embeddings=True), FORMATS["gptq"], ("proj.weight",))
    logits = []
    for directory, stored_as in ((quantised, "gptq"), (floats, "none")):
        config = Config(
            model=ModelConfig(path=str(directory), dtype="float32", quantization=quantization),
            runner=RunnerConfig(device="cpu", num_threads=1),
        )
        loaded = load_model(config, 2, lambda *_: None)
        assert (loaded.info.quantization, loaded.info.checkpoint_quantization) == (quantization, stored_as)
        logits.append(logits_with(loaded.model))
    assert torch.equal(*logits)


def test_a_head_in_four_bits_keeps_its_numbers_in_int4(tmp_path: Path) -> None:
    """With groups in any order, as other linears do."""
    [in_order] = [method for method in METHODS if method.name == "gptq, order"]
    parts, expected = in_order.store(random_weight(40, 96))
    write(tmp_path, of_module("lm_head", parts) | {"model.a.weight": random_weight(40, 96)}, in_order.config)
    with Checkpoint(tmp_path) as checkpoint:
        read = LayerReader(checkpoint, Placement(torch.device("cpu"), torch.float32, "int4"), 1e-6, "model.")
        _, head = read.embedding_and_head("a.weight", (40, 96), is_tied=False)
    assert torch.equal(head.rows(torch.arange(40)), expected)
