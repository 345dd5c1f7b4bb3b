"""`roseinfer generate` and `roseinfer chat`: continues a prompt, or holds a conversation, at a terminal."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from roseinfer.cli.progress import show_loading
from roseinfer.config.options import Config
from roseinfer.errors import ConfigError, InvalidRequest, RequestError
from roseinfer.llm.llm import LLM
from roseinfer.messages import SamplingParams, check_text
from roseinfer.text.templates import ChatTemplate, read_chosen_template

_DEFAULT_MAX_TOKENS = 256
_HELP = """\
/clear   forget the conversation
/exit    leave; Ctrl-D does the same
/help    this list
Ctrl-C stops an answer.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate. Without `max_tokens`, the default as far as the context has room."""

    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Sampling":
        """Read the flags that `generate` and `chat` share."""
        params = SamplingParams(
            temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k, seed=arguments.seed
        )
        return cls(params, arguments.max_tokens, tuple(arguments.stop))

    def params_for(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """The default number of tokens is cut to the context; a number that was asked for is not."""
        room = max(1, max_model_len - num_prompt_tokens)
        return msgspec.structs.replace(self.params, max_tokens=self.max_tokens or min(_DEFAULT_MAX_TOKENS, room))


def start(config: Config) -> LLM:
    """Load the model, showing progress."""
    with show_loading(config.model.path) as on_progress:
        return LLM(config=config, on_progress=on_progress)


def read_prompt() -> str:
    """All of standard input. Raises ConfigError."""
    with _reading():
        return sys.stdin.read()


@contextmanager
def _reading() -> Iterator[None]:
    """What standard input holds that is no text becomes a ConfigError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not {error.encoding.upper()}: {error.reason}", param="standard input") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", param="standard input") from None


def generate(config: Config, prompt: str, sampling: Sampling) -> int:
    """Stream the continuation of `prompt` to standard output. Raises InvalidRequest before anything is loaded."""
    if not prompt:
        raise InvalidRequest("is empty", param="PROMPT")
    check_text(prompt, "PROMPT")
    with start(config) as llm:
        _answer(llm, llm.encode(prompt), sampling, [])
    sys.stdout.write("\n")
    return 0


def chat(config: Config, system: str | None, sampling: Sampling) -> int:
    """Read, answer, repeat, until /exit or the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()

    check_text(system or "", "--system")
    chosen = read_chosen_template(config.server.chat_template)
    with start(config) as llm:
        template = ChatTemplate.load(Path(llm.info.checkpoint_dir), chosen)
        if template is None:
            raise ConfigError(
                "has no chat template: give one with --chat-template; `roseinfer generate` continues plain text",
                param="model.path",
            )
        opening = [] if system is None else [{"role": "system", "content": system}]
        messages = list(opening)
        _note(f"{llm.config.served_model_name}; /help lists the commands")
        while (line := _read()) is not None and line != "/exit":
            match line:
                case "":
                    continue
                case "/clear":
                    messages = list(opening)
                case "/help":
                    _note(_HELP.rstrip())
                case _ if line.startswith("/"):
                    _note(f"no command {line}; /help lists them")
                case _:
                    messages = _turn(llm, template, messages, line, sampling)
    return 0


def _turn(
    llm: LLM, template: ChatTemplate, messages: list[dict[str, str]], line: str, sampling: Sampling
) -> list[dict[str, str]]:
    """The conversation after one more question; unchanged when the question was refused."""
    asked = [*messages, {"role": "user", "content": line}]
    answer: list[str] = []
    try:
        with suppress(KeyboardInterrupt):  # stops the answer, not the conversation
            _answer(llm, llm.encode(template.render(asked), add_special_tokens=False), sampling, answer)
    except RequestError as error:
        _note(f"{error.message} /clear starts anew.")
        return messages
    sys.stdout.write("\n")
    sys.stdout.flush()  # or `input` would meet what cannot be written
    return [*asked, {"role": "assistant", "content": "".join(answer)}]


def _answer(llm: LLM, prompt: list[int], sampling: Sampling, pieces: list[str]) -> None:
    """Stream to standard output and into `pieces`."""
    request_id = llm.submit(prompt, sampling.params_for(len(prompt), llm.info.max_model_len), stop=sampling.stop)
    for piece in llm.stream(request_id):
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()


def _read() -> str | None:
    """One line of input; None at its end. Ctrl-C empties the line. Raises ConfigError for what is no text."""
    prompt = "> " if sys.stdin.isatty() else ""
    if not sys.stdout.isatty():  # where `input` would write it, among the answers
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    try:
        with _reading():
            return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        _note("")
        return ""


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
