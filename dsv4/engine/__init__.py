"""A serving engine on this cache: requests that come and go, one ragged forward a step."""

from dsv4.engine.engine import Engine, RaggedModel
from dsv4.engine.request import Output, TokenLogprobs
from dsv4.engine.sampling_params import SamplingParams
from dsv4.engine.thread import EngineDeadError, EngineSnapshot, EngineThread, QueueFullError

__all__ = [
    "Engine",
    "EngineDeadError",
    "EngineSnapshot",
    "EngineThread",
    "Output",
    "QueueFullError",
    "RaggedModel",
    "SamplingParams",
    "TokenLogprobs",
]
