"""Finds a checkpoint by its path or Hugging Face id, and reads its safetensors files as checked, dequantised tensors.

Every error in a checkpoint is a ConfigError about `model.path`, in one sentence that names the file and the tensor.
"""

import json
import logging
import math
import mmap
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec
import safetensors
import torch

from roseinfer.config.options import DEMO_MODEL
from roseinfer.errors import ConfigError
from roseinfer.messages import SamplingDefaults
from roseinfer.model.weights.dequantize import CONFIG_FILES, UNUSED_SUFFIXES, Quantization, input_order
from roseinfer.runtime.memory import drop_pages

_DEMO_DIRECTORY = Path(__file__).parents[2] / "demo"
STORE_SCHEMES = ("s3://", "gs://")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = f"{_WEIGHTS_FILE}.index.json"
_UNSERVED_SAMPLING = {  # unsupported fields of generation_config.json, and their values without effect
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "sequence_bias": {},
    "forced_eos_token_id": None,
    "stop_strings": [],
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "top_h": None,
    "exponential_decay_length_penalty": None,
}

_log = logging.getLogger(__name__)


def _refuse(message: str, cause: Exception | None = None, *, param: str = "model.path") -> NoReturn:
    raise ConfigError(message, param=param) from cause


def resolve_checkpoint(path: str, revision: str | None = None, *, has_weights: bool = True) -> Path:
    """The directory of `roseinfer/demo`, of a path, or of a Hugging Face id or an address in S3, which are fetched.

    Without `has_weights` no weights are downloaded.
    Raises ConfigError, with what to change, if there is none.
    """
    if path.startswith(STORE_SCHEMES):
        from roseinfer.model.weights.object_store import fetch as fetch_objects

        _check_no_revision(revision, f"{path} lies in a store")
        return fetch_objects(path, has_weights=has_weights)
    try:
        directory = _DEMO_DIRECTORY if path == DEMO_MODEL else Path(path).expanduser()
        is_directory, is_there = directory.is_dir(), directory.exists()
    except (OSError, RuntimeError) as error:  # such as a closed directory above it; no such user, of `~user`
        _refuse(f"{path} cannot be read: {(isinstance(error, OSError) and error.strerror) or error}")
    if is_directory:
        _check_no_revision(revision, f"{path} is {'the embedded model' if path == DEMO_MODEL else 'a directory here'}")
        return directory
    if path == DEMO_MODEL:
        _refuse(f"The embedded model is missing from this installation: there is no {directory}.")
    if is_there:
        _refuse(f"{path} is a file; the model is the directory that holds config.json and the safetensors files.")
    if not _HUB_ID.fullmatch(path):
        _refuse(f"There is no checkpoint directory {path}.")
    from roseinfer.model.weights.hub import fetch  # half a second that a directory's reader need not wait

    return fetch(path, revision, has_weights=has_weights)


def _check_no_revision(revision: str | None, what: str) -> None:
    if revision is not None:  # else another one than was asked for would be served in silence
        _refuse(f"{what}, and only a Hugging Face id has revisions.", param="model.revision")


class _Content(msgspec.Struct):
    content: str


class _Added(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """What of tokenizer.json says the ids of tokens that are not the model's of it; the rest is passed over."""

    added_tokens: list[_Added] | None = None


class Checkpoint:
    """A directory with config.json and safetensors files, whose tensors are read one by one.

    A context manager: the files stay open until it ends.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = self._json("config.json")
        self.quantization = self._read_quantization()
        self._files: dict[str, Any] = {}  # open files by name
        self._lent: dict[str, tuple[int, int]] = {}  # addresses of what was lent of each, from the first to the last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Each file is closed with its last use: a thread of transformers may still read when another one has failed.
        self._files.clear()

    @cached_property
    def _unread(self) -> set[str]:
        return set(self._file_of)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all tensors; a quantised weight has that of the float one."""
        return self.quantization.names_of(self._file_of) if self.quantization else frozenset(self._file_of)

    @property
    def architectures(self) -> list[str]:
        """As config.json names them; none where it does not. Raises ConfigError."""
        named = self.config.get("architectures") or []
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            _refuse(f"{self.directory}/config.json: architectures {named!r} is no list of names.")
        return named

    @property
    def num_matrix_elements(self) -> int:
        """Numbers in all matrices, from the files' headers. Old checkpoints' causal masks have four dimensions.

        A packed weight is counted as if it had four bits, which it mostly has.
        """
        slices = [self._open(file).get_slice(name) for name, file in self._file_of.items()]
        shapes = [(piece.get_shape(), 8 if piece.get_dtype() == "I32" else 1) for piece in slices]
        return sum(math.prod(shape) * num_each for shape, num_each in shapes if len(shape) == 2)

    def misshapen(self) -> str | None:
        """A tensor of another shape than most whose names differ from its own in their place alone, such as experts."""
        shapes = {name: tuple(self._open(file).get_slice(name).get_shape()) for name, file in self._file_of.items()}
        kinds = {name: re.sub(r"\b\d+\b", "", name) for name in shapes}
        counts, totals = Counter((kinds[name], shape) for name, shape in shapes.items()), Counter(kinds.values())
        odd = (name for name, shape in shapes.items() if 2 * counts[kinds[name], shape] < totals[kinds[name]])
        return min(odd, default=None)

    def eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The ids below `vocab_size` that end a text: of generation_config.json, else config.json, and the tokenizer's.

        Models that were taught to chat may name their end there alone: without it, their answers would not end.
        """
        value = self._generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            _refuse(f"{self.directory}: eos_token_id {value} is neither a token id nor a list of them.")
        all_ids = dict.fromkeys([*ids, *self._eos_of_tokenizer()])
        return tuple(token_id for token_id in all_ids if token_id < vocab_size)

    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling parameters of generation_config.json. Logs those that are not supported."""
        given = {name: value for name, value in self._generation_config.items() if value is not None}
        if given.get("top_k") == -1:  # as some write that there is no limit
            given["top_k"] = 0
        for name, neutral in _UNSERVED_SAMPLING.items():
            if given.get(name, neutral) != neutral:
                _log.warning("generation_config.json: %s=%s is not supported and has no effect", name, given[name])
        try:
            return msgspec.convert(given, SamplingDefaults)
        except msgspec.ValidationError as error:
            name = f"{self.directory}/generation_config.json"
            _refuse(f"{name}: {error}; with `model.generation_config` = `ignore` it is passed over.", error)

    def lent(self, name: str) -> torch.Tensor:
        """One tensor as of `tensor`, but in the one mapping of its file, so that there may be any number of them."""
        return self.tensor(name, is_lent=True)

    def let_go(self) -> None:
        """Give back the pages of memory that reading lent tensors took. Who reads them again takes them again."""
        for first, last in self._lent.values():
            start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                drop_pages(start, end)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, *, is_lent: bool = False) -> torch.Tensor:
        """One tensor, mapped from its file, in its own floating type; a quantised one dequantised.

        Raises ConfigError for another shape than `shape`.
        """
        parts = self._parts_of(name)
        if not parts and name not in self._file_of:
            _refuse(f"{self.directory} has no tensor {name}.")
        path = self.directory / self._file_of[next(iter(parts.values()), name)]
        tensor = self._dequantised(name, parts, path) if parts else self._mapped(name, is_lent=is_lent)
        is_float = tensor.is_floating_point() and tensor.itemsize > 1
        if not is_float or tensor.shape != (tensor.shape if shape is None else shape):
            _refuse(
                f"{path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; "
                f"config.json asks for floating point{'' if shape is None else f' {list(shape)}'}."
            )
        return tensor

    def input_order(self, *names: str) -> torch.Tensor | None:
        """The order of inputs [inputs] in which those that share a scale lie together, if all these weights have it.

        None where it is the order in the file, where some have another, and where 32 inputs would not share a scale.
        """
        orders = []
        for name in names:
            parts = {
                part: self._mapped(stored) for part, stored in self._parts_of(name).items() if part.endswith("g_idx")
            }
            orders.append(input_order(parts))
        first = orders[0]
        same = first is not None and all(each is not None and torch.equal(each, first) for each in orders)
        return first if same else None

    def _dequantised(self, name: str, parts: Mapping[str, str], path: Path) -> torch.Tensor:
        assert self.quantization is not None
        try:
            return self.quantization.weight({part: self._mapped(stored) for part, stored in parts.items()})
        except (ValueError, IndexError, RuntimeError) as error:  # the last two of torch, where shapes do not fit
            _refuse(f"{path}: {name} cannot be dequantised: {str(error).splitlines()[0]}.", error)

    def _parts_of(self, name: str) -> dict[str, str]:
        """Part -> tensor of a quantised weight; none of another tensor."""
        return self.quantization.parts_of(name, self._file_of) if self.quantization else {}

    def _mapped(self, name: str, *, is_lent: bool = False) -> torch.Tensor:
        """The tensor as it is in its file, in a mapping of its own unless it is lent.

        That is freed with the tensor: the file's pages are not held beside the copy on the device.
        """
        path = self.directory / self._file_of[name]
        try:
            if is_lent:
                tensor: torch.Tensor = self._open(path.name).get_tensor(name)
                first, last = self._lent.get(path.name, (tensor.data_ptr(), 0))
                end = tensor.data_ptr() + tensor.nbytes
                self._lent[path.name] = min(first, tensor.data_ptr()), max(last, end)
            else:
                with safetensors.safe_open(path, framework="pt") as file:
                    tensor = file.get_tensor(name)
        except safetensors.SafetensorError as error:
            _refuse(f"{path}: tensor {name} cannot be read: {error}.", error)
        self._unread.discard(name)
        return tensor

    def has_other_values(self, name: str, tied_to: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a tensor `name` other than `tied_to`, to which config.json ties it; if so, it counts."""
        if name not in self.names:
            return False
        tensor, other = self.tensor(name, shape), self.tensor(tied_to, shape)
        if tensor.dtype == other.dtype and torch.equal(tensor, other):
            return False
        _log.warning("config.json ties %s to %s, but the file's differ, and both are used", name, tied_to)
        return True

    def check_all_read(self, ignored: tuple[str, ...]) -> None:
        """Raise ConfigError if a tensor was not read, unless its name ends as one of `ignored`."""
        if self.quantization:
            ignored += UNUSED_SUFFIXES
        unread = [name for name in sorted(self._unread) if not name.endswith(ignored)]
        strangers = [name for name in unread if not self._is_no_bias(name)]
        if strangers:
            file = self.directory / self._file_of[strangers[0]]
            _refuse(f"{file}: tensor {strangers[0]} does not belong to a {self.config.get('model_type')} model.")

    def _is_no_bias(self, name: str) -> bool:
        """Whether it is zeros that AutoGPTQ writes as the bias of a linear without one."""
        packed = f"{name.removesuffix('bias')}qweight"
        return name.endswith(".bias") and packed in self._file_of and not self._mapped(name).any()

    def _read_quantization(self) -> Quantization | None:
        """As config.json says, or a file beside it where that does not; None for float weights."""
        name, config = "config.json", self.config.get("quantization_config")
        config = self.config.get("compression_config") if config is None else config  # the first compressed-tensors'
        for name_beside, method in CONFIG_FILES.items():
            if config is None and (self.directory / name_beside).exists():
                content = self._json(name_beside)
                section = content.get("quantization", content)
                name, config = name_beside, section
                if isinstance(section, dict):
                    config = {"quant_method": method, **section}
        if config is None:
            return None
        try:
            return Quantization.read(config, self.config.get("model_type"))
        except msgspec.ValidationError as error:
            _refuse(f"{self.directory / name}: {error}.", error)

    def _eos_of_tokenizer(self) -> list[int]:
        """The id of the `eos_token` that the tokenizer's files name, if it is one of the tokens that they add."""
        settings = self._json_if_any("tokenizer_config.json")
        named = settings.get("eos_token") or self._json_if_any("special_tokens_map.json").get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        if not isinstance(text, str):
            return []
        file = self.directory / "tokenizer.json"
        try:
            listed = msgspec.convert(settings.get("added_tokens_decoder") or {}, dict[int, _Content], strict=False)
            added = msgspec.json.decode(file.read_bytes(), type=_AddedTokens).added_tokens if file.is_file() else []
        except (msgspec.ValidationError, msgspec.DecodeError, OSError):  # which the reader of the tokenizer names
            return []
        ids = {token.content: token.id for token in added or []}
        ids |= {token.content: token_id for token_id, token in listed.items()}
        return [ids[text]] if text in ids else []

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        return self._json_if_any("generation_config.json")

    def _json_if_any(self, name: str) -> dict[str, Any]:
        return self._json(name) if (self.directory / name).exists() else {}

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """Tensor name -> file name, from the index of a sharded checkpoint or from the files themselves.

        Without an index a `model.safetensors` has all tensors, whatever files lie beside it.
        """
        index = _INDEX_FILE
        if (self.directory / index).exists():
            weight_map = self._json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                _refuse(f"{self.directory / index} has no weight_map.")
            for file in weight_map.values():
                if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                    _refuse(f"{self.directory / index}: {file!r} is no safetensors file beside it.")
            shards = {str(file): frozenset(self._open(str(file)).keys()) for file in set(weight_map.values())}
            if _WEIGHTS_FILE not in shards and (self.directory / _WEIGHTS_FILE).exists():  # left by another save
                _log.warning("%s says where the weights are; %s beside it is not read", index, _WEIGHTS_FILE)
            for name, file in weight_map.items():
                if name not in shards[file]:
                    _refuse(f"{self.directory / file} has no tensor {name}, where {index} places it.")
            return weight_map
        files = sorted(file.name for file in self.directory.glob("*.safetensors"))
        if not files:
            _refuse(f"{self.directory} has no safetensors file; other formats, as GGUF, are not read.")
        if _WEIGHTS_FILE in files and len(files) > 1:  # the weights in the vendor's own form, adapters
            _log.info("%s has the weights; %d other safetensors files are not read", _WEIGHTS_FILE, len(files) - 1)
            files = [_WEIGHTS_FILE]
        return self._contents_of(files)

    def _contents_of(self, files: list[str]) -> dict[str, str]:
        """Tensor name -> file name. Raises ConfigError for one in two files, as of shards that two saves left."""
        file_of = dict[str, str]()
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118 (not a mapping)
                if (other := file_of.setdefault(name, file)) != file:
                    _refuse(f"{self.directory} has no {_INDEX_FILE}, and {name} is both in {other} and in {file}.")
        return file_of

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self.directory / file_name
            try:
                self._files[file_name] = safetensors.safe_open(path, framework="pt")
            except FileNotFoundError as error:
                _refuse(f"{path} is missing.", error)
            except (safetensors.SafetensorError, OSError) as error:
                _refuse(f"{path} is truncated or no safetensors file: {error}.", error)
        return self._files[file_name]

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            _refuse(f"{self.directory} has no {name}.", error)
        except (OSError, ValueError) as error:
            _refuse(f"{path} cannot be read as JSON: {error}.", error)
        if not isinstance(content, dict):
            _refuse(f"{path} is not a JSON object.")
        return content
