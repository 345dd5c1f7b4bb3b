from roseinfer.config.options import Config as Config
from roseinfer.errors import RoseinferError as RoseinferError
from roseinfer.llm.llm import LLM as LLM
from roseinfer.llm.llm import Completion as Completion
from roseinfer.messages import SamplingParams as SamplingParams
from roseinfer.text.answers.reasoning import Thinking as Thinking

__version__: str
