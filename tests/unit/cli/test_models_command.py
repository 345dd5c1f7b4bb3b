"""`roseinfer models`: what it says of a checkpoint, as a table and as JSON, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from roseinfer.cli.main import main
from roseinfer.config.options import DEMO_MODEL
from roseinfer.model.weights.checkpoint import resolve_checkpoint

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def told(directory: Path, capsys: pytest.CaptureFixture[str], exit_code: int = 0) -> dict[str, Any]:
    assert main(["models", str(directory), "--json"]) == exit_code
    outline: dict[str, Any] = json.loads(capsys.readouterr().out)
    return outline


def test_a_file_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "roseinfer/demo"]) == 0
    assert "GPT2LMHeadModel: served by a file of its own" in capsys.readouterr().out


def test_memory_of_each_type_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of linears, a table of embeddings that is the head too, and five norms."""
    config = AutoConfig.for_model(
        "qwen3", **SHAPE, intermediate_size=96, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    outline = told(tmp_path, capsys, exit_code=2)
    assert "has no safetensors file" in outline["lacks"]
    in_linears = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96) + 100 * 64
    in_norms = 2 * (64 + 64 + 16 + 16) + 64
    assert (outline["served_by"], outline["parameters"]) == ("native", in_linears + in_norms)
    assert [row["weight_bytes"] for row in outline["types"]] == [
        4 * (in_linears + in_norms),
        2 * in_linears + 4 * in_norms,
        in_linears + 4 * in_norms,
        in_linears * 9 // 16 + 4 * in_norms,
    ]
    assert [row["kv_bytes_per_token"] for row in outline["types"]] == [2 * 2 * 2 * 16 * size for size in (4, 2, 2, 2)]
    assert all(row["kv_int8_bytes_per_token"] == 2 * 2 * 2 * (16 + 4) for row in outline["types"])
    assert all(1000 < row["tokens_here"] < row["tokens_here_with_kv_int8"] for row in outline["types"])


@pytest.mark.parametrize(
    ("model_type", "architecture", "is_tested"),
    [
        ("gemma2", "Gemma2ForCausalLM", True),
        ("bert", "BertLMHeadModel", False),
        ("jetmoe", "JetMoeForCausalLM", False),  # whose attention depends on numbers
    ],
)
def test_a_type_that_only_a_server_compares_is_said_to_be_one(
    model_type: str, architecture: str, is_tested: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.for_model(model_type, **SHAPE, architectures=[architecture], intermediate_size=96)
    config.save_pretrained(tmp_path)
    outline = told(tmp_path, capsys, exit_code=2)  # without a tokenizer
    assert (outline["served_by"], outline["is_tested"]) == ("transformers", is_tested)
    assert main(["models", str(tmp_path)]) == 2
    assert ("a server does at start" in capsys.readouterr().out) is not is_tested


def test_positions_are_those_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than config.json says where YaRN stretches them, fewer where rotations would change behind them."""
    shape = SHAPE | {"num_key_value_heads": 2, "intermediate_size": 96}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    configs = {
        "qwen2": {"rope_parameters": yarn, "max_position_embeddings": 40},
        "phi3": {"rope_parameters": long, "original_max_position_embeddings": 64, "pad_token_id": 0},
    }
    found = {}
    for model_type, fields in configs.items():
        AutoConfig.for_model(model_type, **shape, **fields).save_pretrained(tmp_path)
        found[model_type] = told(tmp_path, capsys, exit_code=2)["positions"]
    assert found == {"qwen2": 128, "phi3": 64}


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("falcon", {}, "has attention of its own"),
        ("t5", {}, "is an encoder and a decoder"),
    ],
)
def test_what_is_refused_says_why(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model(model_type, **SHAPE).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    outline = told(tmp_path, capsys, exit_code=2)
    assert outline["served_by"] == "refused"
    assert reason in outline["reason"]
    assert main(["models", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "lack"),
    [
        ("tokenizer.json", None, "The checkpoint has no tokenizer"),
        ("model.safetensors", None, "has no safetensors file"),
        ("model.safetensors", b"\x08", "is truncated or no safetensors file"),
    ],
)
def test_a_part_that_is_missing_or_broken(
    name: str, content: bytes | None, lack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in resolve_checkpoint(DEMO_MODEL).iterdir():
        if path.name != name:
            (tmp_path / path.name).symlink_to(path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["models", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    why, how, *_ = out.splitlines()
    assert why.startswith(f"GPT2LMHeadModel: cannot be served as it is. {'' if 'tokenizer' in lack else tmp_path}")
    assert lack in why
    assert how == "When it is whole it is served by a file of its own, the fastest way."


def test_a_name_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "a[bold]" / "[" / "b]"
    directory.mkdir(parents=True)
    assert main(["models", str(directory)]) == 2
    assert capsys.readouterr().out == f"{directory} has no config.json.\n"


def test_a_directory_without_a_model_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(tmp_path)]) == 2
    assert capsys.readouterr().out == f"{tmp_path} has no config.json.\n"
