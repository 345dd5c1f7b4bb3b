"""Asks the engine for embeddings of prompts, and finishes them: fewer dimensions, and a length of 1."""

import numpy as np
import numpy.typing as npt

from roseinfer.errors import InvalidRequest
from roseinfer.messages import EmbeddingInfo, Pooling, SamplingParams


def embedding_params(info: EmbeddingInfo, pooling: Pooling | None, dimensions: int | None) -> SamplingParams:
    """What the engine is to do. Raises InvalidRequest for more dimensions than there are, or another pooling."""
    if dimensions is not None and dimensions > info.size:
        message = f"`dimensions` is {dimensions}; this model's embeddings have {info.size}."
        raise InvalidRequest(message, param="dimensions")
    if info.unserved and pooling is None:
        message = f"This checkpoint asks for {info.unserved}, which is not served; `pooling` can be `last` or `mean`."
        raise InvalidRequest(message, param="pooling")
    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling=pooling or info.pooling)


def finished(raw: bytes, info: EmbeddingInfo, dimensions: int | None) -> npt.NDArray[np.float32]:
    """The embedding [dimensions] of what the engine pooled.

    Fewer dimensions are the first ones, as models with Matryoshka embeddings are trained for (Kusupati et al. 2022).
    """
    vector = np.frombuffer(raw, np.float32)[:dimensions]
    if not info.is_normalized:
        return vector
    length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
    return (vector / np.float64(length or 1.0)).astype(np.float32)
