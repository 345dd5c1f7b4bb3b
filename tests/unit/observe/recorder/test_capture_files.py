"""The directories of captures and profiles: room is made for them, and a manifest is whole and tells no secret."""

import json
from pathlib import Path

import pytest

from roseinfer.config.options import Config, ModelConfig, ObserveConfig, ServerConfig
from roseinfer.observe.recorder.capture_files import manifest_facts, profile_directory, write_profile_manifest


def test_a_profile_by_hand_makes_room_for_itself(tmp_path: Path) -> None:
    directories: list[Path] = []
    for _ in range(4):
        directories.append(profile_directory(str(tmp_path / "captures"), max_mib=0.06))
        directories[-1].mkdir(parents=True)
        (directories[-1] / "trace.json").write_bytes(bytes(50_000))
    assert [directory.exists() for directory in directories] == [False, False, True, True]


def test_a_manifest_that_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_profile_manifest({}, tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_the_facts_of_a_manifest_hold_no_secret_and_name_the_versions(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(path="roseinfer/demo"),
        server=ServerConfig(api_key_file=str(tmp_path / "secret-keys"), host="10.1.2.3"),
        observe=ObserveConfig(capture_dir=str(tmp_path)),
    )
    facts = manifest_facts(config, "1.2.3")
    text = json.dumps(facts)
    assert "secret-keys" not in text
    assert "10.1.2.3" not in text
    assert facts["config"]["scheduler"]["max_num_seqs"] == 64
    assert facts["versions"]["roseinfer"] == "1.2.3"
    assert {"python", "torch", "numpy", "nvidia_driver"} <= set(facts["versions"])
