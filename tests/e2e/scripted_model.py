"""`roseinfer` with a model that says what the prompt asks for: the rest is real, from the sockets to the block tables.

A user's message holds a JSON list of strings behind `Say: `; the first is the answer to it, the second the answer to
what comes back, such as the result of a tool, and so on. The tokenizer is that of the embedded model, with the tags of
Qwen3 as added tokens, and the chat template reads tools, thoughts and `enable_thinking` as that of Qwen3 does.

Run as `python -m tests.e2e.scripted_model DIRECTORY serve ...`; the checkpoint is written into the directory.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import tokenizers

from roseinfer import wiring
from roseinfer.cli.main import main
from roseinfer.config.options import Config
from roseinfer.engine.core.batch import Int32Array, SlotBinding
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.messages import EmbeddingInfo, EngineInfo, StartupProgress
from tests.fake_runner import POOLED_SIZE, FakeRunner
from tests.repo.tree import ROOT

MAX_MODEL_LEN = 65536  # a coding agent's first request has 40,000 tokens of this vocabulary
BLOCK_SIZE = 16
ADDED_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
MARK = "Say: "
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Functions:' }}{% for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\nCall one as <tool_call>{"name": its name, "arguments": an object}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('The system message comes first.') }}{% endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- set thoughts = message.reasoning_content %}
        {%- if thoughts %}{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{% endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def write_checkpoint(directory: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(ROOT / "src" / "roseinfer" / "demo" / "tokenizer.json"))
    inner.add_special_tokens([TURN, END_OF_TURN])
    inner.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in ADDED_TOKENS])
    inner.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": END_OF_TURN, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def scripted_reply(prompt: str) -> str:
    """What the prompt wants said at its end: as many turns after the script as there were, so far is it followed."""
    script = prompt.rpartition(MARK + "[")[2]
    replies, _ = json.JSONDecoder().raw_decode("[" + script)
    turn = script.count(f"{TURN}assistant\n") - 1
    return str(replies[min(turn, len(replies) - 1)])


class ScriptedRunner(FakeRunner):
    """Writes and reads its paged memory as the fake does, and says what the prompt in it asks for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, num_blocks: int, num_slots: int) -> None:
        vocab_size = tokenizer.get_vocab_size()
        super().__init__(vocab_size=vocab_size, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=num_slots)
        self._tokenizer = tokenizer
        self._replies: dict[bytes, list[int]] = {}  # token ids by prompt

    def _next_token(self, history: Int32Array, binding: SlotBinding) -> int:
        assert (history >= 0).all(), "a KV entry was read before it was written"
        prompt, said = history[: binding.num_prompt_tokens], len(history) - binding.num_prompt_tokens
        if (reply := self._replies.get(prompt.tobytes())) is None:
            text = scripted_reply(self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)) + END_OF_TURN
            reply = self._replies[prompt.tobytes()] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return reply[min(said, len(reply) - 1)]


def build_engine(config: Config, on_progress: Callable[[StartupProgress], None]) -> Engine:
    """In the place of `wiring.build_engine`."""
    directory = Path(config.model.path)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    num_slots, num_blocks = config.scheduler.limits.max_active_seqs, 4 * MAX_MODEL_LEN // BLOCK_SIZE
    eos_token_id = tokenizer.token_to_id(END_OF_TURN)
    assert eos_token_id is not None
    info = EngineInfo(
        checkpoint_dir=str(directory),
        model_type="scripted",
        num_parameters=0,
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[eos_token_id],
        embedding=EmbeddingInfo(size=POOLED_SIZE),
        device="cpu",
        dtype="float32",
        attention="scripted",
        linear="scripted",
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        startup_s={},
    )
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(eos_token_id,),
        grammars=wiring._build_grammars(info),
    )
    return Engine(scheduler, ScriptedRunner(tokenizer, num_blocks, num_slots), Phases(), info, 0)


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    write_checkpoint(checkpoint)
    wiring.build_engine = build_engine
    options = ["--engine.transport", "thread", "--model", str(checkpoint), "--served-model-name", "scripted"]
    sys.exit(main([*sys.argv[2:], *options]))
