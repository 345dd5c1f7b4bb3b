"""Builds the modules of a checkpoint as transformers does, and has it read the weights. Refuses what is no decoder.

The weights stay where they are, in the mapped files and in the type of the file, until a layer of ours copies them. No
code of a checkpoint is ever run.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch._meta_registrations  # for tensors without numbers; `wiring.py` keeps it out of other engines
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from roseinfer.errors import ConfigError
from roseinfer.model.weights.checkpoint import Checkpoint
from roseinfer.runtime.stand_ins import forget_stand_ins, stand_in

# Our functions among transformers' own. In steps there is none for masks: for each it would look at the positions.
IN_STEPS, IN_FIRST_PASS = "roseinfer", "roseinfer_first_pass"
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # that a cache of keys and values serves
_CHANGING_ROPES = ("dynamic", "longrope")
_FURTHER_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
MODEL_ERRORS = (  # of transformers' code over a configuration that it cannot read or compute
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError),
    *(StrictDataclassError, TypeError, ValueError),
)
_LONGEST_REASON = 300  # characters
_log = logging.getLogger(__name__)
OnParameter = Callable[[nn.Module, str, nn.Parameter | None], nn.Parameter | None]


_COMPILER_MODULES = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")
# What of it marks functions or masks, and changes nothing where nothing is compiled.
_MARKS = frozenset(
    {"allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph", "TransformGetItemToIndex"}
)


@contextmanager
def sparing_imports() -> Iterator[None]:
    """Keeps transformers from importing torch's compiler, for decorators, and tensors spread over machines.

    The first takes 106 MB and a second, the second 15 MB.
    """
    if _COMPILER_MODULES[0] not in sys.modules:
        stand_in(*_COMPILER_MODULES, marks=_MARKS)
    is_available, torch.distributed.is_available = torch.distributed.is_available, _is_not_available
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        forget_stand_ins()


def _is_not_available() -> bool:
    return False


def modules(checkpoint: Checkpoint, attention: str = IN_FIRST_PASS) -> Any:
    """The modules of a checkpoint, without numbers. Raises ConfigError where transformers does not know them."""
    config, _ = _read_config(checkpoint)

    def make() -> Any:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    model = _with_base(_of_transformers(make, checkpoint), checkpoint)
    _fix_ropes(model)  # which would look at the numbers of positions
    return model


def load(checkpoint: Checkpoint, dtype: torch.dtype, on_parameter: OnParameter | None) -> Any:
    """The model of transformers, with its weights. Raises ConfigError.

    With `on_parameter`, which may take numbers away while they come, matrices stay in the file and in its type where
    that is no wider than `dtype`; without, transformers can compute with them.
    """
    config, model_class = _read_config(checkpoint)
    lazily = {name: _Lazy(checkpoint, name, dtype if on_parameter else None) for name in checkpoint.names}

    def read() -> Any:
        try:
            return model_class.from_pretrained(
                None,
                config=config,
                state_dict=lazily,
                dtype=dtype,
                attn_implementation=IN_FIRST_PASS,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # refused below, with their names
                output_loading_info=True,
            )
        except RuntimeError as error:
            for refusal in (tensor.refusal for tensor in lazily.values() if tensor.refusal):
                raise refusal from error
            if (name := checkpoint.misshapen()) is not None:
                refuse(checkpoint, f"has {name} in another shape than the tensors of its kind")
            _check_shapes(checkpoint)
            raise

    hook: Any = None if on_parameter is None else register_module_parameter_registration_hook(on_parameter)  # type: ignore[arg-type]  # its annotation forgets the result
    try:
        model, found = _of_transformers(read, checkpoint)
    finally:
        if hook is not None:
            hook.remove()
    if missing := found.get("missing_keys"):
        refuse(checkpoint, f"has no tensor {min(missing)}")
    for name, stored, wanted in sorted(found.get("mismatched_keys") or ()):
        _refuse_shape(checkpoint, name, stored, wanted)
    unread = sorted(found.get("unexpected_keys") or ())
    if checkpoint.quantization and (scales := [name for name in unread if name.endswith(".scales")]):
        refuse(checkpoint, f"has {scales[0]}: AWQ scales an activation by it, which is not supported")
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        _log.warning("the file's %s%s: no module of the model reads it, and it has no effect", unread[0], more)
    checkpoint.let_go()
    _fix_ropes(_with_base(model, checkpoint))
    return model.train(False)


def _check_shapes(checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a tensor that has not the shape of the module of its name."""
    for name, wanted in modules(checkpoint).state_dict().items():
        if name in checkpoint.names and (stored := checkpoint.lent(name)).shape != wanted.shape:
            _refuse_shape(checkpoint, name, stored.shape, wanted.shape)


def _refuse_shape(checkpoint: Checkpoint, name: str, stored: Iterable[int], wanted: Iterable[int]) -> NoReturn:
    refuse(checkpoint, f"has {name} as {list(stored)} where config.json asks for {list(wanted)}")


def _with_base(model: Any, checkpoint: Checkpoint) -> Any:
    """The model, if its layers and its head are apart. Raises ConfigError."""
    if not hasattr(model, model.base_model_prefix):  # as of Llama 4's text without the model around it
        refuse(checkpoint, f"is a {model.config.model_type}, whose layers are not apart from its head")
    return model


class _Lazy:
    """A tensor in a state dict, read when transformers asks for it on a device and in a type, as of a file's slices."""

    refusal: ConfigError | None = None  # which transformers does not pass on

    def __init__(self, checkpoint: Checkpoint, name: str, kept_for: torch.dtype | None) -> None:
        """A matrix that is asked for as `kept_for` stays in its own type, if that is no wider."""
        self._checkpoint, self._name, self._kept_for = checkpoint, name, kept_for

    def __getitem__(self, _: Any) -> "_Lazy":
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        try:
            tensor = self._checkpoint.lent(self._name)
        except ConfigError as error:
            self.refusal = error
            raise
        if dtype is None or (dtype == self._kept_for and tensor.dim() > 1 and tensor.itemsize <= dtype.itemsize):
            return tensor
        return tensor.to(device, dtype, copy=True)


def _read_config(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The configuration, and the class of transformers that computes the model."""

    def read() -> Any:
        # A type of ours stands for the file's, which has no effect, and may have a name that torch does not know.
        return transformers.AutoConfig.from_pretrained(
            checkpoint.directory, trust_remote_code=False, dtype=torch.float32
        )

    config = _of_transformers(read, checkpoint)
    vars(config).pop("quantization_config", None)  # the weights come as floats
    with sparing_imports():
        model_class = _model_class(config, checkpoint)
    for part in (config, config.get_text_config(decoder=True)):
        part.return_dict = True  # a training may have left other wishes: a tuple, or every layer's rows, held in vain
        for name in _FURTHER_OUTPUTS:
            if hasattr(part, name):
                setattr(part, name, False)
    return config, model_class


def _of_transformers(make: Callable[[], Any], checkpoint: Checkpoint) -> Any:
    """What transformers makes; its errors are ConfigError."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what it reports in tables, we say in a line
    try:
        with sparing_imports():
            return make()
    except MODEL_ERRORS as error:
        if isinstance(error, KeyError) and error.args == (IN_FIRST_PASS,):
            refuse(checkpoint, "has attention of its own, which no other can take the place of")
        if "contains custom code" in str(error):
            refuse(checkpoint, "needs code of its own (`auto_map` in config.json), which is never run")
        raise ConfigError(
            f"{checkpoint.directory}: transformers cannot load it: {reason_of(error)}", param="model.path"
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def reason_of(error: Exception) -> str:
    """What went wrong in transformers' code, in one line."""
    words = " ".join(str(error).split())
    is_sentence = bool(words) and not isinstance(error, LookupError | ArithmeticError | AssertionError)
    return (words if is_sentence else f"{type(error).__name__} {words}".strip())[:_LONGEST_REASON]


def _model_class(config: Any, checkpoint: Checkpoint) -> Any:
    """The class of transformers that computes it. Raises ConfigError for a model that cannot be served."""
    text = config.get_text_config(decoder=True)
    if not isinstance(text, transformers.PreTrainedConfig):
        refuse(checkpoint, f"is a {config.model_type}, which has no text_config")
    if config.is_encoder_decoder:
        refuse(checkpoint, "is an encoder and a decoder")
    known = transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001
    found = known.get(type(config), ())
    classes = {each.__name__: each for each in (found if isinstance(found, tuple) else (found,))}
    asked = [name for name in config.architectures or classes if name in classes]
    if not asked and classes and _is_bare(config):
        config.tie_word_embeddings = True  # it has no head, and needs none: its rows are for embeddings
        asked = list(classes)
    if not asked:
        named = ", ".join(config.architectures or [config.model_type])
        refuse(checkpoint, f"asks for {named}, which is no decoder we know")
    if others := set((text.layer_types if hasattr(text, "layer_types") else None) or ()) - _LAYER_TYPES:
        refuse(checkpoint, f"has layers of {', '.join(sorted(others))}")
    fields = text.to_dict()
    for name, is_usual in (("use_bidirectional_attention", False), ("is_causal", True)):
        if bool(fields.get(name, is_usual)) is not is_usual:
            refuse(checkpoint, f"sees the tokens behind each token too ({name} in config.json)")
    return classes[asked[0]]


def _is_bare(config: Any) -> bool:
    """Whether it was saved without a head, as `AutoModel` does."""
    bare = transformers.AutoModel._model_mapping.get(type(config), ())  # noqa: SLF001
    return any(each.__name__ in config.architectures for each in (bare if isinstance(bare, tuple) else (bare,)))


def max_positions(config: Any, checkpoint: Checkpoint) -> int:
    """Positions whose rotations do not depend on what else is in a batch: dynamic ropes change behind them."""
    limit = config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None
    if not isinstance(limit, int) or limit < 1:
        refuse(checkpoint, "does not say how many positions it has (max_position_embeddings)")
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)]  # of types of layers: else it is of all
    for kind in kinds or [rope]:
        if kind.get("rope_type") == "longrope":
            limit = min(limit, int(kind.get("original_max_position_embeddings", limit)))
    if not kinds and rope.get("rope_type") == "yarn":
        # The stretched context, of which config.json may still name the trained one.
        limit = max(limit, int((rope.get("factor") or 1) * rope["original_max_position_embeddings"]))
    return limit


def _fix_ropes(model: Any) -> None:
    """Have rotations stay as they are up to `max_positions`, without a look at the positions of each step."""
    for module in model.modules():  # their types are of the forward pass alone, as frequencies are made
        kinds = vars(module).get("rope_type")
        if isinstance(kinds, dict):  # by the type of layers
            module.rope_type = {
                layers: "default" if kind in _CHANGING_ROPES else kind for layers, kind in kinds.items()
            }
        elif kinds in _CHANGING_ROPES:
            module.rope_type = "default"


def refuse(checkpoint: Checkpoint, what: str) -> NoReturn:
    raise ConfigError(f"{checkpoint.directory} {what}; it cannot be served.", param="model.path")
