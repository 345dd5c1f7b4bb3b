"""Checkpoints: what is read from them, and the one sentence about each thing that may be wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.config.options import DEMO_MODEL
from roseinfer.errors import ConfigError
from roseinfer.messages import SamplingDefaults
from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.families.registry import build_model
from roseinfer.model.weights.checkpoint import Checkpoint, resolve_checkpoint
from tests.unit.model.conftest import Shape, write_checkpoint

FLOAT32 = Placement(torch.device("cpu"), torch.float32)
SHAPE = Shape()
EMBEDDINGS = (SHAPE.vocab_size + SHAPE.num_positions) * SHAPE.width
LAYER = 12 * SHAPE.width**2 + 13 * SHAPE.width
NUM_PARAMETERS = EMBEDDINGS + SHAPE.num_layers * LAYER + 2 * SHAPE.width


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", SHAPE)


def build(directory: Path) -> CausalLM:
    with Checkpoint(directory) as checkpoint:
        return build_model(checkpoint, FLOAT32)


def head_of(directory: Path) -> torch.Tensor:
    """The model's answer to one hidden row: it tells which head was loaded."""
    return build(directory).logits(torch.linspace(-1, 1, SHAPE.width).expand(2, -1))[0]


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        build(directory)
    assert caught.value.param == "model.path"
    assert "\n" not in caught.value.message
    return caught.value.message


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_parameters_are_counted_once(directory: Path) -> None:
    model = build(directory)
    assert model.num_parameters == NUM_PARAMETERS
    assert (model.vocab_size, model.max_positions, model.attention_spec.num_heads) == (131, 256, 2)


def test_all_the_ways_gpt2_is_stored_are_the_same_model(tmp_path: Path, directory: Path) -> None:
    expected = head_of(directory)
    prefixed = write_checkpoint(tmp_path / "prefixed", Shape(prefix="transformer."))
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    change_tensors(prefixed, lambda tensors: tensors.update(masks))
    change_tensors(prefixed, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 0}))
    assert torch.equal(head_of(prefixed), expected)
    shard(directory)
    assert torch.equal(head_of(directory), expected)


def test_an_untied_head_is_read_and_counted(tmp_path: Path) -> None:
    untied = write_checkpoint(tmp_path / "untied", Shape(is_tied=False))
    assert build(untied).num_parameters == NUM_PARAMETERS + SHAPE.vocab_size * SHAPE.width
    before = head_of(untied)
    change_tensors(untied, lambda tensors: tensors["lm_head.weight"].mul_(2))
    torch.testing.assert_close(head_of(untied), before * 2)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_head_that_config_json_ties_and_the_file_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    """The file's head is used if it differs; one that is equal stays tied, and is counted once."""
    directory = write_checkpoint(tmp_path / "untied", Shape(is_tied=False, prefix=prefix))
    expected = head_of(directory)
    change_config(directory, tie_word_embeddings=True)
    assert torch.equal(head_of(directory), expected)
    assert build(directory).num_parameters == NUM_PARAMETERS + SHAPE.vocab_size * SHAPE.width
    assert f"ties lm_head.weight to {prefix}wte.weight" in caplog.messages[0]
    caplog.clear()
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[f"{prefix}wte.weight"] + 0}))
    assert build(directory).num_parameters == NUM_PARAMETERS
    assert not caplog.messages


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_type_is_converted(directory: Path, dtype: torch.dtype) -> None:
    expected = head_of(directory)
    change_tensors(directory, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    torch.testing.assert_close(head_of(directory), expected, atol=0.05, rtol=0.05)


def test_without_architectures_the_model_type_decides(directory: Path) -> None:
    change_config(directory, architectures=None)
    assert build(directory).model_type == "gpt2"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["BertModel"]}, "asks for BertModel, which is no decoder we know"),
        ({"architectures": None, "model_type": "bert"}, "has no tensor bert"),
        ({"n_head": 5}, "n_embd is not a multiple of n_head"),
        ({"n_layer": 0}, "n_layer"),
        ({"n_layer": "two"}, "n_layer"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "root of the head size"),
        ({"n_layer": 3}, "has no tensor h.2.ln_1.weight"),
        ({"n_layer": 1}, "tensor h.1.attn.c_attn.bias does not belong to a gpt2 model"),
        ({"vocab_size": 132}, "model.safetensors: tensor wte.weight is float32 [131, 32]; config.json asks for"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(directory: Path, changes: dict[str, object], told: str) -> None:
    change_config(directory, **changes)
    assert told in refusal(directory)


def test_tensors_that_do_not_fit(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update({"ln_f.bias": torch.zeros(32, dtype=torch.int32)}))
    assert "model.safetensors: tensor ln_f.bias is int32 [32]; config.json asks for floating point" in refusal(
        directory
    )
    change_tensors(directory, lambda tensors: tensors.pop("h.1.mlp.c_fc.weight"))
    assert "has no tensor h.1.mlp.c_fc.weight" in refusal(directory)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file(directory: Path, size: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert f"{path} is truncated or no safetensors file" in refusal(directory)


def test_files_that_are_missing(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty has no config.json" in refusal(tmp_path / "empty")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "has no safetensors file" in refusal(directory)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "other.safetensors"])
def test_a_file_beside_model_safetensors_is_not_read(directory: Path, name: str) -> None:
    """Neither one with the same tensors, before it or after it by name, nor one with others: an adapter."""
    expected = head_of(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file({each: tensor + 1 for each, tensor in tensors.items()}, directory / name)
    save_file({"base_model.h.0.attn.c_attn.lora_A.weight": torch.ones(2, 2)}, directory / "adapter_model.safetensors")
    assert torch.equal(head_of(directory), expected)


def test_files_without_an_index_are_read_together(directory: Path) -> None:
    expected = head_of(directory)
    shard(directory)
    (directory / "model.safetensors.index.json").unlink()
    assert torch.equal(head_of(directory), expected)


def test_a_tensor_in_two_files_without_an_index_is_refused(directory: Path) -> None:
    """As of two saves, whose later one would win by its name."""
    shard(directory)
    (directory / "model.safetensors.index.json").unlink()
    save_file(load_file(directory / "model-00001-of-00002.safetensors"), directory / "model-00001-of-00003.safetensors")
    found = refusal(directory)
    assert re.search(r"no model\.safetensors\.index\.json, and .* is both in .*-00002\.\S+ and in .*-00003\.", found)


def test_an_index_that_does_not_fit(directory: Path) -> None:
    shard(directory)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"wte.weight": weight_map["wpe.weight"]}}))
    assert "has no tensor wte.weight, where model.safetensors.index.json places it" in refusal(directory)
    index.write_text("{}")
    assert "has no weight_map" in refusal(directory)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (directory / weight_map["wte.weight"]).unlink()
    assert f"{weight_map['wte.weight']} is missing" in refusal(directory)


@pytest.mark.parametrize(("content", "told"), [("{", "cannot be read as JSON"), ("[]", "is not a JSON object")])
def test_a_config_that_is_no_config(directory: Path, content: str, told: str) -> None:
    (directory / "config.json").write_text(content)
    assert told in refusal(directory)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({"eos_token_id": [5, 7]}, {}, (5, 7)),
        ({}, {"eos_token_id": 6}, (6,)),
        (None, {"eos_token_id": [6]}, (6,)),
        (None, {}, ()),
        (None, {"eos_token_id": None}, ()),
        (None, {"eos_token_id": 50256}, ()),
    ],
)
def test_eos_ids(
    directory: Path, generation: dict[str, object] | None, config: dict[str, object], expected: tuple[int, ...]
) -> None:
    change_config(directory, **config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.eos_token_ids(vocab_size=131) == expected


def test_a_single_file_beside_an_index_is_said_to_be_passed_over(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two saves into one directory leave both, and transformers would read the other one."""
    expected, single = head_of(directory), (directory / "model.safetensors").read_bytes()
    shard(directory)
    assert torch.equal(head_of(directory), expected)
    assert caplog.messages == []
    (directory / "model.safetensors").write_bytes(single)
    change_tensors(directory, lambda tensors: tensors["wte.weight"].mul_(2))
    assert torch.equal(head_of(directory), expected)
    assert "model.safetensors beside it is not read" in caplog.text


ADDED = {"added_tokens": [{"id": 7, "content": "<end>", "special": True}]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": ADDED}, (5, 7)),
        ({"special_tokens_map.json": {"eos_token": {"content": "<end>"}}, "tokenizer.json": ADDED}, (5, 7)),
        (
            {"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"8": {"content": "<end>"}}}},
            (5, 8),
        ),
        ({"tokenizer_config.json": {"eos_token": "<other>"}, "tokenizer.json": ADDED}, (5,)),
        ({"tokenizer_config.json": {"eos_token": None}, "tokenizer.json": ADDED}, (5,)),
        ({"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": {"added_tokens": "none"}}, (5,)),
    ],
    ids=str,
)
def test_the_tokenizer_names_an_end_too(directory: Path, files: dict[str, object], expected: tuple[int, ...]) -> None:
    """Models that were taught to chat have it there alone: their answers would not end."""
    change_config(directory, eos_token_id=5)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.eos_token_ids(vocab_size=131) == expected


def test_an_eos_id_that_is_none(directory: Path) -> None:
    change_config(directory, eos_token_id=[0, "end"])
    with Checkpoint(directory) as checkpoint, pytest.raises(ConfigError, match="neither a token id nor a list"):
        checkpoint.eos_token_ids(vocab_size=131)


def defaults_of(directory: Path, generation: dict[str, object]) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(generation))
    with Checkpoint(directory) as checkpoint:
        return checkpoint.sampling_defaults()


def test_sampling_defaults(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.sampling_defaults() == SamplingDefaults()
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert defaults_of(directory, qwen) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert defaults_of(directory, {"top_k": -1}) == SamplingDefaults()
    nulls: dict[str, object] = {"temperature": None, "top_k": None, "min_p": 0.1, "repetition_penalty": None}
    assert defaults_of(directory, nulls) == SamplingDefaults(min_p=0.1)


def test_what_is_not_served_of_sampling_is_named(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral: dict[str, object] = {"repetition_penalty": 1.0, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": None}
    defaults_of(directory, neutral)
    assert caplog.messages == []
    defaults_of(directory, {"temperature": 0.7, "repetition_penalty": 1.05, "typical_p": 0.9})
    assert caplog.messages == ["generation_config.json: typical_p=0.9 is not supported and has no effect"]
    caplog.clear()
    defaults_of(directory, {"stop_strings": ["\n\n"], "guidance_scale": 1, "forced_eos_token_id": None})
    assert caplog.messages == ["generation_config.json: stop_strings=['\\n\\n'] is not supported and has no effect"]


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": "all"}, {"min_p": 2}, {"repetition_penalty": 1e-39}], ids=str
)
def test_a_sampling_default_that_is_none_is_named(directory: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json.*{next(iter(wrong))}.*ignore") as caught:
        defaults_of(directory, wrong)
    assert caught.value.param == "model.path"


def test_what_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Eight tensors of 8 MiB, one after the other: no more than the last of them is held."""
    file = tmp_path / "model.safetensors"
    save_file({str(i): torch.full((2048, 1024), float(i)) for i in range(8)}, file)
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as checkpoint:
        for i in range(8):
            tensor = checkpoint.tensor(str(i), (2048, 1024))
            assert float(tensor.sum()) == i * 2048 * 1024
        assert 0 < resident_bytes_of(file) <= 9 << 20


def test_a_file_is_closed_with_its_last_use(directory: Path) -> None:
    """A thread of transformers may read on when another has failed: closed under it, the file is what went wrong."""
    with Checkpoint(directory) as checkpoint:
        file = checkpoint._open("model.safetensors")
        tensor = checkpoint.lent("ln_f.weight")
    assert torch.equal(file.get_tensor("ln_f.weight"), tensor)


def resident_bytes_of(file: Path) -> int:
    """How much of a mapped file lies in this process's memory, as Linux tells."""
    num_kib, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            num_kib += int(line.split()[1])
    return num_kib << 10


def test_the_embedded_model_and_directories_are_found(directory: Path) -> None:
    assert (resolve_checkpoint(DEMO_MODEL) / "config.json").exists()
    assert resolve_checkpoint(str(directory)) == directory


@pytest.mark.parametrize("path", ["/no/such/place", "./nowhere", "../up", "a/b/c", "two words"])
def test_a_path_that_cannot_be_an_id_is_never_looked_up(path: str) -> None:
    with pytest.raises(ConfigError, match="There is no checkpoint directory") as caught:
        resolve_checkpoint(path)
    assert caught.value.param == "model.path"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"/{'x' * 300}", "xxx cannot be read: File name too long"),  # as is a path in a closed directory
        ("~no-such-user/model", "~no-such-user/model cannot be read: Could not determine home directory."),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_told(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        resolve_checkpoint(path)
    assert caught.value.param == "model.path"


def test_what_has_no_revisions_is_not_served_under_one(directory: Path) -> None:
    for path in (DEMO_MODEL, str(directory), "s3://bucket/model"):
        with pytest.raises(ConfigError, match="only a Hugging Face id has revisions") as caught:
            resolve_checkpoint(path, "v2")
        assert caught.value.param == "model.revision"


def test_a_file_is_no_checkpoint(directory: Path) -> None:
    with pytest.raises(ConfigError, match="is a file; the model is the directory"):
        resolve_checkpoint(str(directory / "model.safetensors"))
