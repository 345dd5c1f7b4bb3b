"""The tree, its three sources, and the pages that are generated from it."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import yaml

from roseinfer.config import docs as config_docs
from roseinfer.config.options import CacheConfig, Config, ModelConfig, SchedulerConfig, ServerConfig, options
from roseinfer.config.sources import Given, LoadedConfig, load
from roseinfer.errors import ConfigError

ROOT = Path(__file__).parents[3]


def another_value(path: str) -> Any:
    """A valid value that is not the default."""
    option = options()[path]
    if option.is_list:
        return ("https://example.com", "https://example.org:8080")
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    match option.default:
        case bool():
            return not option.default
        case float():
            return option.default / 2
        case int():
            return option.default + 1024 if option.default else 16
        case _:
            number = 4 if option.default == "auto" else 128
            return number if "int" in str(option.type) else 50.0 if "float" in str(option.type) else "another"


def text_of(value: Any) -> str:
    """The value as a flag or a variable says it."""
    match value:
        case bool():
            return json.dumps(value)
        case tuple():
            return "; ".join(value)
        case _:
            return str(value)


def value_at(loaded: LoadedConfig, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(loaded.config, section), name)


@pytest.mark.parametrize("path", options())
def test_every_option_can_be_given_in_three_ways(path: str, tmp_path: Path) -> None:
    value, option = another_value(path), options()[path]
    # A larger token budget lets every other number of the scheduler stand alone.
    budget = {} if path == "scheduler.max_num_batched_tokens" else {"scheduler.max_num_batched_tokens": 4096}
    file = tmp_path / "config.yaml"
    section, name = path.split(".")
    tree: dict[str, dict[str, Any]] = {"scheduler": {"max_num_batched_tokens": 4096}} if budget else {}
    tree.setdefault(section, {})[name] = value
    file.write_text(yaml.safe_dump(tree))
    text = text_of(value)
    extra = {p: Given(str(v), "test") for p, v in budget.items()}

    from_file = load(file=file)
    from_environment = load(extra, {option.variable: text})
    from_flag = load({**extra, path: Given(text, option.flag)})

    assert [value_at(loaded, path) for loaded in (from_file, from_environment, from_flag)] == [value] * 3
    assert from_file.config == from_environment.config == from_flag.config
    assert from_file.sources[path] == str(file)
    assert from_environment.sources[path] == option.variable
    assert from_flag.sources[path] == option.flag


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server: {port: 1, max_inflight: 1, host: file}\n")
    env = {"ROSEINFER_SERVER__PORT": "2", "ROSEINFER_SERVER__MAX_INFLIGHT": "2"}
    loaded = load({"server.port": Given("3", "--port")}, env, file)
    assert loaded.config.server == ServerConfig(port=3, max_inflight=2, host="file")
    assert loaded.sources == {
        "server.port": "--port",
        "server.max_inflight": "ROSEINFER_SERVER__MAX_INFLIGHT",
        "server.host": str(file),
    }


def test_nothing_given_is_the_default_tree() -> None:
    assert load() == (Config(), {})


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("scheduler.max_num_seqs", "0", "Expected `integer` >= 1, got '0'"),
        ("scheduler.max_num_seqs", "many", "'many' is not an integer"),
        ("scheduler.max_prefill_seqs", "0", "Expected `integer` >= 1, got '0'"),
        ("cache.block_size", "17", "Expected one of 8, 16, 32, 64, got '17'"),
        ("cache.memory_utilization", "1.5", "Expected `number` <= 1.0, got '1.5'"),
        ("cache.prefix_caching", "maybe", "'maybe' is not true or false"),
        ("engine.step_timeout_s", "nan", "Expected `number` > 0.0, got 'nan'"),
        ("model.quantization", "int3", "Expected one of none, int8, int4, got 'int3'"),
        ("model.packed_cache", "", "Expected `string` of length >= 1, got ''"),
        ("scheduler.speculation", "1000", "Expected `integer` <= 16, got '1000'"),
        ("scheduler.speculation", "0", "Expected `integer` >= 1, got '0'"),
        ("scheduler.speculation", "2.5", "'2.5' is not an integer, nor auto or off"),
        ("scheduler.speculation", "many", "'many' is not an integer, nor auto or off"),
        ("scheduler.target_itl_ms", "nan", "Expected `number` > 0.0, got 'nan'"),
        ("scheduler.target_itl_ms", "-5", "Expected `number` > 0.0, got '-5'"),
        ("scheduler.target_itl_ms", "inf", "Expected `number` <= 60000.0, got 'inf'"),
        ("scheduler.target_itl_ms", "soon", "'soon' is not a number"),
    ],
)
def test_a_value_that_does_not_fit_is_named(path: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({path: Given(text, "--somewhere")})
    assert (caught.value.param, caught.value.message) == (path, sentence)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Config(scheduler=SchedulerConfig(max_num_seqs=0)), "scheduler.max_num_seqs"),
        (lambda: Config(scheduler=SchedulerConfig(max_prefill_seqs=0)), "scheduler.max_prefill_seqs"),
        (lambda: Config(scheduler=SchedulerConfig(max_num_seqs=500)), "scheduler.max_num_batched_tokens"),
        (lambda: Config(cache=CacheConfig(block_size=64), scheduler=SchedulerConfig(max_num_batched_tokens=100)),
         "scheduler.max_num_batched_tokens"),
        (lambda: Config(scheduler=SchedulerConfig(max_num_seqs=8, max_active_seqs=7)), "scheduler.max_active_seqs"),
        (lambda: Config(scheduler=SchedulerConfig(max_prefill_tokens=64, target_itl_ms=50)), "scheduler.target_itl_ms"),
        (lambda: Config(scheduler=SchedulerConfig(target_itl_ms=0.0)), "scheduler.target_itl_ms"),
        (lambda: Config(scheduler=SchedulerConfig(max_num_seqs=8, max_prefill_seqs=32, max_active_seqs=31)),
         "scheduler.max_active_seqs"),
        (lambda: Config(server=ServerConfig(port=9, ops_port=9)), "server.ops_port"),
        (lambda: Config(server=ServerConfig(allowed_origins=("*", "https://example.com/"))), "server.allowed_origins"),
        (lambda: Config(server=ServerConfig(allowed_origins=("example.com",))), "server.allowed_origins"),
        (lambda: Config(model="gpt2"), "model"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_invalid_tree_cannot_be_made(make: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.param == path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("speculation", "'3' is not an integer, nor auto or off"), ("target_itl_ms", "'3' is not a number")],
)
def test_a_tree_s_text_in_place_of_a_number_is_named(name: str, sentence: str) -> None:
    """Of a program that makes the tree itself: text is read as a number elsewhere only."""
    with pytest.raises(ConfigError) as caught:
        Config(scheduler=SchedulerConfig(**{name: "3"}))  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.message) == (f"scheduler.{name}", sentence)


def test_values_at_the_edge_of_a_relation_are_fine() -> None:
    Config(
        scheduler=SchedulerConfig(max_num_seqs=8, max_prefill_seqs=32, max_active_seqs=32, max_num_batched_tokens=24)
    )
    Config(server=ServerConfig(port=0, ops_port=0))
    Config(server=ServerConfig(port=9, ops_port=9, ops_host="::1"))


@pytest.mark.parametrize(
    ("content", "param", "part"),
    [
        ("scheduler: {max_num_seq: 3}", "scheduler.max_num_seq", "did you mean scheduler.max_num_seqs?"),
        ("schedule: {max_num_seqs: 3}", "schedule.max_num_seqs", "did you mean scheduler.max_num_seqs?"),
        ("scheduler: 3", "scheduler", "expected a mapping, got 3"),
        ("- scheduler", "", "expected a mapping"),
        ("scheduler: {nope: 3}", "scheduler.nope", "names no option"),
        ("a: [", "", "is not YAML: line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a: 1\nb: c: d", "", "is not YAML: line 2, column 5: mapping values are not allowed here"),
        ("server: {port: 1}\nserver: {host: a}", "", "is not YAML: line 2, column 1: server comes twice"),
        ("server: {port: 1, host: a, port: 2}", "", "is not YAML: line 1, column 28: port comes twice"),
        ("port: 8600", "port", "names no option; did you mean server: {port: ...}?"),
        ("server.port: 8600", "server.port", "names no option; did you mean server: {port: ...}?"),
        ("a: \x01", "", "is not YAML: character 4: special characters are not allowed"),
    ],
)
def test_a_file_that_does_not_fit_is_named(content: str, param: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert caught.value.param == (f"{file}: {param}" if param else str(file))
    assert caught.value.message.endswith(part) or not param
    assert part in caught.value.message
    assert "\n" not in caught.value.message
    assert "^" not in caught.value.message


@pytest.mark.parametrize("content", ["[server]\nport = 1\n", "port = 1\n"])
def test_a_file_of_another_language_hears_which_is_wanted(content: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"; a file of options is YAML, not TOML$"):
        load(file=file)


@pytest.mark.parametrize(
    "path",
    ["scheduler.speculation", "runner.kernels", "runner.cuda_graphs", "model.packed_cache", "cache.prefix_caching"],
)
def test_off_needs_no_quotes_in_a_file(path: str, tmp_path: Path) -> None:
    """YAML reads the bare word as false."""
    section, name = path.split(".")
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}: {{{name}: off}}")
    loaded = getattr(getattr(load(file=file).config, section), name)
    assert loaded == (False if path == "cache.prefix_caching" else "off")


@pytest.mark.parametrize(("written", "got"), [("yes", "True"), ("2.5", "2.5")])
def test_a_file_s_value_that_is_neither_number_nor_word_is_named(written: str, got: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"scheduler: {{speculation: {written}}}")
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert caught.value.param == "scheduler.speculation"
    assert caught.value.message == f"{got} is not an integer, nor auto or off"


def test_a_merge_may_be_overruled(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: &a {path: x}\nserver:\n  <<: {port: 1, host: a}\n  <<: {ops_port: 3}\n  port: 2\n")
    server = load(file=file).config.server
    assert (server.port, server.host, server.ops_port) == (2, "a", 3)


@pytest.mark.parametrize("written", ["1.0", "0123456", "no", "2026-01-01"])
def test_a_file_s_text_that_yaml_reads_as_something_else_hears_of_quotes(written: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {{revision: {written}}}")
    with pytest.raises(ConfigError, match=r"; in quotes it is a string$"):
        load(file=file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        load(file=tmp_path / "none.yaml")
    assert caught.value.param == str(tmp_path / "none.yaml")


def test_an_empty_file_and_an_empty_section_give_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("")
    assert load(file=file).sources == {}
    file.write_text("server:\n  # port: 1\n")
    assert load(file=file).sources == {}


def test_integers_that_helm_writes_as_floats_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("server: {max_body_bytes: 4.194304e+06}\n")
    assert load(file=file).config.server.max_body_bytes == 4194304


@pytest.mark.parametrize("name", ["ROSEINFER_SCHEDULER_MAX_NUM_SEQS", "ROSEINFER_SERVER__PROT", "ROSEINFER_PORT"])
def test_an_unknown_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(env={name: "8080"})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ROSEINFER_SERVER_PORT", "ROSEINFER_SERVER__PORT"),
        ("ROSEINFER_server__port", "ROSEINFER_SERVER__PORT"),
        ("ROSEINFER_API_KEY", "ROSEINFER_API_KEYS"),
    ],
)
def test_a_variable_that_is_nearly_one_hears_which(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"names no option; did you mean {meant}\?$"):
        load(env={name: "8080"})


def test_other_peoples_variables_are_left_alone() -> None:
    env = {
        "PATH": "/bin",
        "ROSEINFER_REQUIRE_ALL": "1",
        "ROSEINFER_API_KEYS": "a key",
        "ROSEINFER_SERVICE_HOST": "10.0.0.1",
        "ROSEINFER_SERVICE_PORT": "8000",
        "ROSEINFER_OPS_SERVICE_PORT_METRICS": "8001",
        "ROSEINFER_PORT": "tcp://10.0.0.1:8000",
        "ROSEINFER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ROSEINFER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ROSEINFER_PORT_8000_TCP_PROTO": "tcp",
    }
    assert load(env=env) == (Config(), {})


def test_served_model_name_has_three_answers() -> None:
    assert Config().served_model_name == "roseinfer-demo"
    assert Config(model=ModelConfig(path="models/gpt2/")).served_model_name == "gpt2"
    assert Config(server=ServerConfig(served_model_name="x")).served_model_name == "x"


def test_a_model_is_served_under_several_names() -> None:
    for given in ("x; y", ["x", "y"]):
        config = load({"server.served_model_name": Given(given, "test")}).config
        assert (config.served_model_names, config.served_model_name) == (("x", "y"), "x")
    assert load(env={"ROSEINFER_SERVER__SERVED_MODEL_NAME": "x"}).config.served_model_names == ("x",)
    assert load(env={"ROSEINFER_SERVER__SERVED_MODEL_NAME": ""}).config.served_model_name == "roseinfer-demo"


def test_show_prints_a_file_that_loads_to_the_same_tree(tmp_path: Path) -> None:
    given = {
        "scheduler.max_num_seqs": Given("9", "--max-num-seqs"),
        "model.path": Given("a: b # \U0001f600\x7f\\", "--model"),
    }
    loaded = load(given)
    file = tmp_path / "config.yaml"
    file.write_text(config_docs.show(loaded))
    assert load(file=file).config == loaded.config
    lines = config_docs.show(loaded).splitlines()
    assert [line.split()[-1] for line in lines if line.strip().startswith("max_num_seqs:")] == ["--max-num-seqs"]
    assert [line.split()[-1] for line in lines if line.strip().startswith("max_prefill_seqs:")] == ["default"]


def test_the_schema_describes_every_option_and_no_other() -> None:
    schema = config_docs.json_schema()
    for section in fields(Config):
        definition = schema["$defs"][get_type_hints(Config)[section.name].__name__]
        assert definition["additionalProperties"] is False
        described = {name: leaf["default"] for name, leaf in definition["properties"].items() if leaf["description"]}
        ours = {o.name: o.default for o in options().values() if o.section == section.name}
        assert described == ours
    assert "minimum" in schema["$defs"]["SchedulerConfig"]["properties"]["max_num_seqs"]


def test_the_documentation_is_fresh() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == config_docs.markdown(), "run `make docs`"


def test_the_documentation_names_every_option() -> None:
    text = config_docs.markdown()
    for option in options().values():
        assert f"| `{option.path}`" in text
        assert option.short_flag is None or f"`{option.short_flag}`" in text


def test_the_documentation_says_what_variables_do_that_are_no_options() -> None:
    text = config_docs.markdown()
    assert "`ROSEINFER_API_KEYS` holds API keys" in text
    assert "`ROSEINFER_REQUIRE_ALL` belongs to the tests" in text


def test_the_tree_survives_the_engine_link() -> None:
    config = replace(Config(), scheduler=SchedulerConfig(max_num_seqs=3), cache=CacheConfig(prefix_caching=False))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_reading_the_configuration_imports_nothing_heavy() -> None:
    code = "import sys, roseinfer.config.sources; print(*{'torch', 'aiohttp', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
