"""Makes the next turn of a conversation ready for the engine: its prompt, its grammar, and how its text is read.

Each API turns its body into a `Conversation`; from there on they are all the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from roseinfer.errors import InvalidRequest, PromptName
from roseinfer.messages import Grammar
from roseinfer.text.answers.answer import AnswerParser
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.reasoning import AS_THE_TEMPLATE_HAS_IT, Thinking, with_thought
from roseinfer.text.answers.tool_formats import find_tool_format
from roseinfer.text.answers.tool_use import ToolUse
from roseinfer.text.choice import EncodedPrompt
from roseinfer.text.grammar.checker import GrammarChecker, check_form
from roseinfer.text.templates import VARIABLES_FIELD
from roseinfer.text.text_model import TextModel
from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS
from roseinfer.text.turns import Turn, fold_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The turns so far, the functions that may be called, and the form that is asked of the answer."""

    turns: Callable[[], Iterable[Turn]]  # as chat templates read them; made where they are rendered, which takes long
    num_chars: int  # about how many the template writes of them
    functions: Sequence[Function] = ()  # that the model may call
    must_call: bool = False
    is_parallel: bool = True  # an answer may hold several calls
    form: tuple[Grammar, str] | None = None  # the grammar of a text without calls, and its field in errors
    variables: Mapping[str, object]  # of the chat template, which go before those of `thinking`
    thinking: Thinking = AS_THE_TEMPLATE_HAS_IT
    continues_last: bool = False  # the answer continues the last message
    field: str = "messages"  # that holds the turns, in errors
    folds: bool = False  # turns into others, where the template refuses them as they are


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """What the engine gets of a conversation, and what reads the answer."""

    prompt: EncodedPrompt
    grammar: Grammar | None
    tool_use: ToolUse | None  # None: the answer holds no calls

    @property
    def has_parts(self) -> bool:
        """Whether the answer may hold something else than text."""
        return self.tool_use is not None or self.prompt.reasoning is not None

    def parser(self) -> AnswerParser:
        """What separates the parts of one choice."""
        return AnswerParser(self.prompt.reasoning, self.tool_use)


async def prepare_turn(
    conversation: Conversation,
    text_model: TextModel,
    checker: GrammarChecker | None,
    tool_format: str,
    max_model_len: int,
) -> PreparedTurn:
    """Check the form and the functions, and encode the prompt.

    Raises InvalidRequest that names the field, PromptTooLong, Overloaded or NotReady.
    """
    template = text_model.require_chat_template(conversation.field)
    tool_use = None
    if conversation.functions:
        tool_use = ToolUse(
            conversation.functions,
            is_forced=conversation.must_call,
            is_parallel=conversation.is_parallel,
            tool_format=find_tool_format(tool_format, template.tool_source),
        )
    form = conversation.form
    await check_form(form, checker)
    if tool_use is not None and (calls := tool_use.grammar(form and form[0])) is not None:
        form = (calls, "tools")
        await check_form(form, checker)
    prompt = await encode_conversation(conversation, text_model, max_model_len)
    thinking = conversation.thinking
    grammar = with_thought(form and form[0], prompt.reasoning, thinking.max_tokens)
    if form is None and grammar is not None:
        await check_form((grammar, thinking.max_tokens_field), checker)
    return PreparedTurn(prompt, grammar, tool_use)


async def encode_conversation(conversation: Conversation, text_model: TextModel, max_model_len: int) -> EncodedPrompt:
    """The prompt of a conversation. Raises InvalidRequest, or PromptTooLong, which name the field."""
    template = text_model.require_chat_template(conversation.field)
    tools = [function.for_template() for function in conversation.functions] or None
    if tools is not None and not template.knows_tools:
        raise InvalidRequest("`tools`: This model's chat template does not know tools.", param="tools")
    # The template writes all of these into the prompt, so what is too long may be any of them.
    written = {"tools": tools, VARIABLES_FIELD: conversation.variables}
    name = PromptName(conversation.field, tuple(field for field, value in written.items() if value), is_text=True)
    variables = {**template.thinking_variables(conversation.thinking), **conversation.variables}
    render = partial(text_model.render, tools=tools, variables=variables, continues_last=conversation.continues_last)
    is_long = tools is not None or conversation.num_chars + len(str(variables)) > INLINE_CHARS
    tokenizer, turns, refusal = text_model.tokenizer, conversation.turns, None
    # System turns behind the head as the user's, and then all of them so.
    for folded in (turns(), fold_turns(turns(), 1), fold_turns(turns(), 0)) if conversation.folds else (turns(),):
        try:
            text, reasoning = await tokenizer.off_loop(render, folded) if is_long else render(folded)
            # The template writes the special tokens itself.
            [token_ids] = await tokenizer.encode_prompts([text], max_model_len, [name], add_special_tokens=False)
            return EncodedPrompt(token_ids, name, reasoning=reasoning)
        except InvalidRequest as error:
            if error.param != "messages":
                raise
            refusal = refusal or InvalidRequest(error.message, param=conversation.field)
    assert refusal is not None, "there are turns to try"
    raise refusal
