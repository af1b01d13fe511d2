"""A step time in closed form for Vidur, where there is no profile of the device.

    seconds = a + b·P + c·D + d·S + e·Q

P: prompt tokens in the step; D: requests that decode; S: tokens that those have in memory; Q: for each chunk
of a prompt, chunk · (tokens done before + chunk / 2). Every pipeline stage takes that long. The defaults
resemble Llama-3-8B in 16 bit on one A100, and are those of our reference runs of Vidur.

Vidur makes options of the fields, by their types: annotations are not postponed here.
"""

from dataclasses import dataclass, field
from typing import Any

from vidur.config.config import BaseExecutionTimePredictorConfig
from vidur.execution_time_predictor.execution_time_predictor_registry import ExecutionTimePredictorRegistry
from vidur.types.base_int_enum import BaseIntEnum


class PredictorType(BaseIntEnum):
    """One more kind, beside Vidur's ExecutionTimePredictorType, which has 1 to 3."""

    CLOSED_FORM = 1001


@dataclass
class ClosedFormExecutionTimePredictorConfig(BaseExecutionTimePredictorConfig):
    a: float = field(default=0.0085, metadata={"help": "Seconds a step."})
    b: float = field(default=8.0e-5, metadata={"help": "Seconds a prompt token."})
    c: float = field(default=3.0e-5, metadata={"help": "Seconds a request that decodes."})
    d: float = field(default=8.0e-8, metadata={"help": "Seconds a token in the memory of those."})
    e: float = field(default=3.4e-9, metadata={"help": "Seconds a pair of prompt tokens, for attention."})

    @staticmethod
    def get_type() -> Any:
        return PredictorType.CLOSED_FORM


@dataclass(frozen=True)
class StepTime:
    """What Vidur reads of a predicted time, unless it stores operation metrics, which there are none of."""

    total_time: float  # seconds

    @property
    def model_time(self) -> float:
        return self.total_time


class ClosedFormExecutionTimePredictor:
    def __init__(self, predictor_config: ClosedFormExecutionTimePredictorConfig, **_: Any) -> None:
        self._config = predictor_config

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> StepTime:
        prompt_tokens, num_decoding, context, attended = 0, 0, 0, 0.0
        for request, tokens in zip(batch.requests, _computed_tokens(batch), strict=True):
            if request.is_prefill_complete:
                num_decoding += 1
                context += request.num_processed_tokens
            else:
                prompt_tokens += tokens
                attended += tokens * (request.num_processed_tokens + tokens / 2)
        form = self._config
        return StepTime(
            form.a + form.b * prompt_tokens + form.c * num_decoding + form.d * context + form.e * attended
        )


def _computed_tokens(batch: Any) -> Any:
    """How many of each request are computed in this step: Vidur has three names for it."""
    if hasattr(
        batch, "get_num_q_tokens_for_request"
    ):  # the batches of its Mnemosyne engines, which are its default
        return [batch.get_num_q_tokens_for_request(request.id) for request in batch.requests]
    return (
        batch.num_q_tokens if hasattr(batch, "num_q_tokens") else batch.num_tokens
    )  # of PyPI, or the repository


def register() -> None:
    """Make `closed_form` a choice of Vidur's --execution_time_predictor_config_type."""
    ExecutionTimePredictorRegistry.register(PredictorType.CLOSED_FORM, ClosedFormExecutionTimePredictor)
