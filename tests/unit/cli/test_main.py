"""Arguments to configuration, mistakes to one line and an exit code; no engine is started here."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from roseinfer import __version__, serving, wiring
from roseinfer.cli import terminal
from roseinfer.cli.main import main
from roseinfer.config.options import Config, options
from roseinfer.errors import ConfigError, EngineDead, EngineFailed, PromptTooLong
from roseinfer.messages import SamplingParams


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options().values():
        monkeypatch.delenv(option.variable, raising=False)


def serve_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    configs: list[Config] = []

    def serve(config: Config, _keys: str) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    assert main(["serve", *arguments]) == 0
    return configs[0]


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a mistake prints: exactly one line, and exit code 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.rstrip()


@pytest.mark.parametrize("option", [o for o in options().values() if o.type is not bool], ids=lambda o: o.path)
def test_every_option_is_a_flag_of_serve(option: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    value = option.choices[-1] if option.choices else {"int": 70, "float": 0.5}.get(type(option.default).__name__)
    value = value or (70 if any(name in str(option.type) for name in ("int", "float")) else "text")
    bounded = {
        "server.max_body_bytes": 1024,
        "scheduler.max_num_batched_tokens": 1024,
        "observe.slow_gap_factor": 1.5,
        "scheduler.speculation": 7,
        "server.allowed_origins": "https://example.com",
    }
    value = bounded.get(option.path, value)
    expected = (value,) if option.is_list else value
    for flag in filter(None, (option.flag, option.short_flag)):
        section = getattr(serve_with(monkeypatch, flag, str(value)), option.section)
        assert getattr(section, option.name) == expected
        section = getattr(serve_with(monkeypatch, f"{flag}={value}"), option.section)
        assert getattr(section, option.name) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], True),
        (["--no-cache.prefix-caching"], False),
        (["--cache.prefix-caching"], True),
        (["--cache.prefix-caching=false"], False),
        (["--cache.prefix-caching=true"], True),
        (["--no-cache.prefix-caching", "--cache.prefix-caching"], True),
    ],
)
def test_booleans_have_two_spellings(arguments: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve_with(monkeypatch, *arguments).cache.prefix_caching is expected


def test_an_option_with_several_values_takes_them_with_blanks_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["a", "b"], ["a; b"]):
        config = serve_with(monkeypatch, "--served-model-name", *arguments, "--port", "5")
        assert (config.served_model_names, config.server.port) == (("a", "b"), 5)


def test_everyday_options_have_short_names() -> None:
    short = {option.short_flag for option in options().values()} - {None}
    everyday = (
        "model served-model-name dtype kv-cache-dtype quantization chat-template device host port ops-port "
        "max-num-seqs max-model-len api-key-file log-level"
    )
    assert short == {f"--{name}" for name in shlex.split(everyday)}


def test_flag_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSEINFER_SERVER__PORT", "1")
    monkeypatch.setenv("ROSEINFER_SERVER__HOST", "::1")
    config = serve_with(monkeypatch, "--port", "2")
    assert (config.server.port, config.server.host) == (2, "::1")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--max-num-seqs", "0"],
         "roseinfer: scheduler.max_num_seqs (from --max-num-seqs): Expected `integer` >= 1, got '0'"),
        (["serve", "--scheduler.max-num-seqs", "x"],
         "roseinfer: scheduler.max_num_seqs (from --scheduler.max-num-seqs): 'x' is not an integer"),
        (["serve", "--max-num-seq", "4"],
         "roseinfer: --max-num-seq: is not an argument of roseinfer serve; did you mean --max-num-seqs?"),
        (["serve", "--port"], "roseinfer: --port: expected one argument"),
        (["serve", "--port", "banana"], "roseinfer: server.port (from --port): 'banana' is not an integer"),
        (["serve", "--scheduler.nope"], "roseinfer: --scheduler.nope: is not an argument of roseinfer serve"),
        (["serve", "--cache.prefix-caching", "false"],
         ("roseinfer: --cache.prefix-caching: takes no value after a blank: write --cache.prefix-caching, "
          "--cache.prefix-caching=false or --no-cache.prefix-caching")),
        (["serve", "--cache.prefix-caching=maybe"],
         "roseinfer: --cache.prefix-caching: 'maybe' is not true or false"),
        (["serve", "--no-cache.prefix-caching=true"],
         "roseinfer: --no-cache.prefix-caching: takes no value, got 'true'"),
        (["generate", ""], "roseinfer: PROMPT: is empty"),
        (["serve", "extra"], "roseinfer: extra: is not an argument of roseinfer serve"),
        (["serve", ""], "roseinfer: '': is not an argument of roseinfer serve"),
        (["serve", "--port", "a\udcff"], "roseinfer: server.port (from --port): 'a\\udcff' is not UTF-8"),
        (["serve", "openai-community/gpt2"],
         ("roseinfer: openai-community/gpt2: is not an argument of roseinfer serve; "
          "did you mean --model openai-community/gpt2?")),
        (["serve", "--speculation", "4"],
         "roseinfer: --speculation: is not an argument of roseinfer serve; did you mean --scheduler.speculation?"),
        (["serve", "--endpoint=x"],
         ("roseinfer: --endpoint=x: is not an argument of roseinfer serve; "
          "did you mean --kv-events.endpoint or --tracing.endpoint?")),
        (["serve", "--runner.num-threads", "100000"],
         "roseinfer: runner.num_threads (from --runner.num-threads): Expected `integer` <= 1024, got '100000'"),
        (["bench", "serve", "http://h:1"],
         "roseinfer: http://h:1: is not an argument of roseinfer bench serve; did you mean --url http://h:1?"),
        (["generate"], "roseinfer: the following arguments are required: PROMPT; see roseinfer generate --help"),
        (["generate", "x", "--max-tokens", "0"], "roseinfer: --max-tokens: Expected `integer` >= 1, got '0'"),
        (["generate", "x", "--top-p", "1.5"], "roseinfer: --top-p: Expected `number` <= 1.0, got '1.5'"),
        (["generate", "x", "--temperature", "nan"], "roseinfer: --temperature: Expected `number` >= 0.0, got 'nan'"),
        (["chat", "--seed", "-1"], "roseinfer: --seed: Expected `integer` >= 0, got '-1'"),
        (["bench", "streaming", "--num-requests", "0"], "roseinfer: --num-requests: Expected `integer` >= 1, got '0'"),
        (["bench", "streaming", "--prompt-repeats", "1,0"],
         "roseinfer: --prompt-repeats: Expected `integer` >= 1, got '0'"),
        (["bench", "streaming", "--prompt-repeats", ""], "roseinfer: --prompt-repeats: '' is not an integer"),
        (["bench", "streaming", "--prefill-max-batch-size", "0"],
         "roseinfer: scheduler.max_prefill_seqs (from --prefill-max-batch-size): Expected `integer` >= 1, got '0'"),
        (["bench", "scheduler", "--max-batch-size", "-1"],
         "roseinfer: scheduler.max_num_seqs (from --max-batch-size): Expected `integer` >= 1, got '-1'"),
        (["serve", "--model", "a\udcff"], "roseinfer: model.path (from --model): 'a\\udcff' is not UTF-8"),
        (["serve", "--served-model-name", "a", "b\udcff"],
         "roseinfer: server.served_model_name (from --served-model-name): 'b\\udcff' is not UTF-8"),
        (["chat", "--system", "a\udcff"], "roseinfer: --system: holds a lone surrogate, which is no character."),
        (["generate", "a\udcff"], "roseinfer: PROMPT: holds a lone surrogate, which is no character."),
        (["bench", "serve", "--max-lag-share", "inf"],
         "roseinfer: --max-lag-share: Expected `number` <= 1000000000.0, got 'inf'"),
        (["bench", "simulate", "--num-requests", "1000000001"],
         "roseinfer: --num-requests: Expected `integer` <= 1000000, got '1000000001'"),
        (["config", "show", "--config", "no/such.yaml"],
         "roseinfer: no/such.yaml: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_line(capsys, *arguments) == line


def test_a_bad_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSEINFER_SERVER__PORT", "70000")
    line = error_line(capsys, "serve")
    assert line == "roseinfer: server.port (from ROSEINFER_SERVER__PORT): Expected `integer` <= 65535, got '70000'"
    monkeypatch.setenv("ROSEINFER_SERVER__PORT", "banana")
    line = error_line(capsys, "serve")
    assert line == "roseinfer: server.port (from ROSEINFER_SERVER__PORT): 'banana' is not an integer"


@pytest.mark.parametrize("arguments", [[], ["nope"], ["bench"], ["bench", "nope"], ["config", "nope"]])
def test_an_unknown_or_missing_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert error_line(capsys, *arguments).startswith("roseinfer: ")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("is not a directory", param="model.path"), 2,
         "roseinfer: model.path (from --model): is not a directory"),
        (ConfigError("is taken", param="server.port"), 2, "roseinfer: server.port: is taken"),
        (PromptTooLong("It is too long.", param="prompt"), 2, "roseinfer: prompt: It is too long."),
        (PromptTooLong("`prompt` is too long.", param="prompt"), 2, "roseinfer: prompt: is too long."),
        (ConfigError("says \x1b[2J", param="--url"), 2, "roseinfer: --url: says \\x1b[2J"),
        (EngineFailed("The engine failed."), 70, "roseinfer: The engine failed."),
        (EngineDead("The engine's process has ended."), 70, "roseinfer: The engine's process has ended."),
    ],
)  # fmt: skip
def test_errors_become_exit_codes(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(_: Config, _keys: str) -> int:
        raise error

    monkeypatch.setattr(serving, "serve", serve)
    assert main(["serve", "--model", "x"]) == code
    assert capsys.readouterr().err.rstrip() == line


def test_the_exit_code_of_serve_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "serve", lambda _, _keys: 70)
    assert main(["serve"]) == 70


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(_: Config, _keys: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "serve", serve)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_the_engine_process_gets_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "engine_main", lambda fd: fd)
    assert main(["engine", "--fd", "17"]) == 17


def test_config_commands_print_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--port", "9"]) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines() if "  port:" in line] == [["port:", "9", "#", "--port"]]
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$defs"]["ServerConfig"]
    assert main(["config", "docs"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration\n")


def test_generate_passes_prompt_and_sampling_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Config, str, terminal.Sampling]] = []

    def generate(config: Config, prompt: str, sampling: terminal.Sampling) -> int:
        calls.append((config, prompt, sampling))
        return 0

    monkeypatch.setattr(terminal, "generate", generate)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    flags = "--temperature 0.5 --top-p 0.9 --top-k 7 --seed 3 --max-tokens 9 --stop a --stop b --device cpu"
    assert main(["generate", "-", *shlex.split(flags)]) == 0
    [(config, prompt, sampling)] = calls
    assert (config.runner.device, prompt) == ("cpu", "from a pipe")
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=3)
    assert sampling == terminal.Sampling(params, 9, ("a", "b"))
    assert sampling.params_for(10, 1024).max_tokens == 9


def test_the_usual_length_gives_way_to_the_context() -> None:
    sampling = terminal.Sampling(SamplingParams(), None, ())
    assert [sampling.params_for(n, 1024).max_tokens for n in (10, 1000, 1023, 2000)] == [256, 24, 1, 1]


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "config"])
def test_help_begins_with_the_everyday_options_by_their_short_names(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: roseinfer {command} [options]")
    everyday, *sections = re.split(r"\n\n(\w+):\n", text[text.index("everyday:\n") :])
    short = [option for option in options().values() if option.short_flag]
    shown = re.findall(r"^  (--[\w.-]+)", everyday, re.MULTILINE)
    assert shown == ["--config", *(option.short_flag for option in short)]
    rest = re.findall(r"^  (--[\w.[\]-]+)", "\n".join(sections), re.MULTILINE)
    assert rest == [
        f"--[no-]{option.path.replace('_', '-')}" if option.type is bool else option.flag
        for option in options().values()
        if not option.short_flag
    ]


def test_version_and_help_are_quick_to_load() -> None:
    """They import nothing that a command needs, and the help names every command."""
    code = (
        "import sys\nfrom roseinfer.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: print(end.code)\n"
        "print({'torch', 'aiohttp', 'numpy', 'rich', 'tokenizers'} & set(sys.modules))"
    )
    for argument, part in (("--version", f"roseinfer {__version__}"), ("--help", "serve")):
        done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
        assert part in done.stdout
        assert done.stdout.split()[-2:] == ["0", "set()"]


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roseinfer", "serve", "--nope"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "roseinfer: --nope: is not an argument of roseinfer serve\n"


@pytest.mark.parametrize(
    ("moment", "code"), [("import", -signal.SIGINT), ("exit", 0)], ids=["while it imports", "while Python ends"]
)
def test_an_interrupt_before_or_after_the_command_is_no_traceback(moment: str, code: int) -> None:
    program = (
        "import atexit, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'roseinfer.cli.main': signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if sys.argv[2] == 'import': sys.meta_path.insert(0, Interrupting())\n"
        "if sys.argv[2] == 'exit': atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "sys.argv[2:] = []\n"
        "from roseinfer.__main__ import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "--version", moment]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def output_of(*arguments: str, output: IO[bytes] | None, **streams: Any) -> "subprocess.CompletedProcess[bytes]":
    """The exit code, and what the command says on standard error, with that as its standard output."""
    command = [sys.executable, "-m", "roseinfer", *arguments]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False, **streams)


@pytest.mark.parametrize("arguments", [("config", "show"), ("config", "docs"), ("kernels", "list")])
def test_output_that_cannot_be_written_is_told_whatever_its_length(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = output_of(*arguments, output=full)
    assert done.returncode == 2
    assert done.stderr == b"roseinfer: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [("config", "show"), ("kernels", "list")])
def test_a_reader_that_never_reads_is_no_error(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        done = output_of(*arguments, output=output)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_the_output_cannot_encode_is_escaped() -> None:
    command = [sys.executable, "-m", "roseinfer", "config", "docs"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"number \\u2265 0" in done.stdout


def test_a_mistake_whose_sentence_goes_nowhere_has_its_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as broken_pipe:
        command = [sys.executable, "-m", "roseinfer", "serve", "--nope"]
        assert subprocess.run(command, stderr=broken_pipe, check=False).returncode == 2


@pytest.mark.parametrize(
    ("stdin", "line"),
    [
        ("printf '\\xff' | {}", b"roseinfer: standard input: is not UTF-8: invalid start byte\n"),
        ("{} <&-", b"roseinfer: PROMPT: is empty\n"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_told(stdin: str, line: bytes) -> None:
    command = ["bash", "-c", stdin.format(f"{sys.executable} -m roseinfer generate -")]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_what_a_command_has_begun(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: servers that it started are ended, and the terminal is as before."""
    has_ended = False

    def generate(*_: object) -> int:
        nonlocal has_ended
        try:
            signal.raise_signal(number)
        finally:
            has_ended = True
        return 0

    monkeypatch.setattr(terminal, "generate", generate)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught:
            main(["generate", "x"])
        assert (caught.value.code, has_ended) == (128 + number, True)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m roseinfer config docs | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(serving, "serve", serve)
    assert error_line(capsys, "serve") == "roseinfer: what was asked for takes more memory than there is"


def test_too_few_descriptors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(serving, "serve", serve)
    assert "ulimit -n" in error_line(capsys, "serve")


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))]
)
def test_too_few_processes_are_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_nothing(*_: object) -> int:
        raise error

    monkeypatch.setattr(serving, "serve", open_nothing)
    assert "ulimit -u" in error_line(capsys, "serve")


SERVE = """
import os
from roseinfer.cli.main import main


def fork():
    print(len(os.listdir("/proc/self/task")), os.environ["OPENBLAS_NUM_THREADS"], flush=True)
    os._exit(0)


os.fork = fork
main(["serve"])
"""


def test_a_server_has_no_threads_of_blas_whose_lack_would_end_it_as_if_asked_to() -> None:
    """OpenBLAS, which numpy brings along, sends SIGINT where it cannot start a thread for each core."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "5"}
    command = [sys.executable, "-c", SERVE]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["1", "5"]


PARENT = """
import socket, subprocess, sys
ours, theirs = socket.socketpair()
command = [sys.executable, "-P", "-m", "roseinfer", sys.argv[1], "--fd", str(theirs.fileno())]
child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
child.wait()
"""
IMPORTED = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", ["engine", "telemetry"])
def test_a_child_that_still_imports_ends_with_its_parent(name: str, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(IMPORTED)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, name]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        stat = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        parent.kill()
    deadline_s = time.monotonic() + 60
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < deadline_s, "it runs on"
        time.sleep(0.01)
