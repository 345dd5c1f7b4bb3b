"""The model that is served, as its requests see it: its names, its text side, and the engine that runs it."""

import sys

from roseinfer.config.options import Config
from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.errors import NotReady
from roseinfer.text.choice import EncodedPrompt
from roseinfer.text.conversation import Conversation, PreparedTurn, encode_conversation, prepare_turn
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.text_model import TextModel


class ServedModel:
    """Prepares the requests of every API for the engine; the text side is there when the engine is ready."""

    def __init__(self, config: Config, client: EngineClient, grammar_checker: GrammarChecker | None = None) -> None:
        self._tool_format = config.structured.tool_format
        self._text_model: TextModel | None = None
        self.client = client
        self.grammar_checker = grammar_checker
        self.model_names = config.served_model_names

    def open(self, text_model: TextModel) -> None:
        """Begin to serve: everything is loaded."""
        self._text_model = text_model

    @property
    def text_model(self) -> TextModel:
        """Raises NotReady before `open`."""
        if self._text_model is None:
            raise NotReady(f"The server is {self.activity}.")
        return self._text_model

    @property
    def activity(self) -> str:
        """What it does while it does not serve, in a word."""
        return "loading"

    async def prepare_turn(self, conversation: Conversation) -> PreparedTurn:
        """Make a conversation ready for the engine. Raises RequestError."""
        return await prepare_turn(
            conversation, self.text_model, self.grammar_checker, self._tool_format, self.client.info.max_model_len
        )

    async def encode_conversation(self, conversation: Conversation) -> EncodedPrompt:
        """The prompt of a conversation, also where it is longer than the context. Raises InvalidRequest."""
        return await encode_conversation(conversation, self.text_model, sys.maxsize)

    def close(self) -> None:
        """End what encodes its texts."""
        if self._text_model is not None:
            self._text_model.tokenizer.close()
