"""What a request gave: its text, whole or piece by piece, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from polymodel.config import DynamicPrecision
from polymodel.sample import Sampling
from polymodel.sequence import LogitsProcessor, Sequence
from polymodel.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DrafterMetrics:
    """What one drafter did for a request. Counts of tokens; its chain beside others in a tree counts as its own."""

    num_rounds: int
    num_drafted: int
    num_accepted: int
    draft_acceptance_rate: float
    num_catch_up: int  # tokens that it read because it had not drafted from the start
    seconds: float  # of its forwards, an equal part of those that it shared with other requests
    num_absent: int  # rounds in which it was not in memory, so that it did not draft
    error: str  # that ended its drafting, "" if none did
    acceptance_profile: tuple[dict[str, Any], ...]  # by position: rounds in which all before it stood, and it as well


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a request cost. Times in seconds; counts of tokens."""

    queue_seconds: float  # from submission to its first forward
    time_to_first_token: float  # from submission
    decode_seconds: float  # first token to last
    tokens_per_second: float  # after the first token, the time included that others had the lane; 0.0 for one token
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt: their pages were taken over
    num_resumed_tokens: int  # of the prompt: a sibling's lower layers were taken over
    num_prefill_token_layers: int  # tokens prefilled, times the layers that each went through
    num_output_tokens: int
    num_preemptions: int  # times it gave its pages up for an older request
    num_target_forwards: int  # after the prefill
    num_draft_rounds: int  # of these, with drafts
    num_drafted: int
    num_accepted: int
    draft_acceptance_rate: float
    mean_acceptance_length: float  # tokens a target forward yielded
    acceptance_histogram: tuple[int, ...]  # rounds by number of accepted tokens
    drafters: dict[str, DrafterMetrics]
    num_low_bit_steps: int  # of the twin that were kept, by dynamic precision
    num_fallbacks: int  # steps that the twin tried and the model ran in full


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the tokens beside model and prompt."""

    sampling: Sampling
    stop_ids: frozenset[int]
    stop: tuple[str, ...]
    logits_processor: LogitsProcessor | None
    precision: DynamicPrecision | None

    def options(self) -> dict[str, Any]:
        """As `Engine.submit` takes them."""
        sampling = {name: getattr(self.sampling, name) for name in Sampling.__slots__}
        return sampling | {
            "stop_at_eos": False,
            "stop_ids": sorted(self.stop_ids),
            "stop": self.stop,
            "logits_processor": self.logits_processor,
            "precision": self.precision,
        }


@dataclass(frozen=True, slots=True)
class Output:
    """What a request gave."""

    model: str
    prompt_ids: list[int]
    tokens: list[int]  # the stop token included
    text: str
    finish_reason: str  # "stop", "length" or "cancelled"
    metrics: Metrics
    receipt: dict[str, str]  # what decided the bits
    settings: Settings = field(repr=False)  # what `Engine.verify_exact` replays

    def report(self) -> dict[str, Any]:
        """All but the settings, as plain data."""
        return {
            name: asdict(value) if name == "metrics" else value
            for name in self.__slots__
            if name != "settings"
            for value in [getattr(self, name)]
        }


def output_of(request: Sequence, receipt: dict[str, str]) -> Output:
    """Of a request that is over."""
    return Output(
        model=request.model,
        prompt_ids=request.tokens[: request.num_prompt],
        tokens=request.output,
        text=request.stop.text if request.stop is not None else _text(request.hosted.tokenizer, _shown(request)),
        finish_reason=request.finish_reason,
        metrics=_metrics(request),
        receipt=receipt,
        settings=Settings(
            sampling=request.sampler.sampling,
            stop_ids=request.stop_ids,
            stop=() if request.stop is None else request.stop.stops,
            logits_processor=request.logits_processor,
            precision=request.precision,
        ),
    )


class Pieces:
    """The text of a request as it comes, for one reader."""

    def __init__(self, request: Sequence) -> None:
        self._request = request
        self._text = request.hosted.tokenizer.decode_stream(continues=True)
        self._num_taken = 0  # tokens, or characters where stop strings decide what is shown
        self.is_over = False

    def is_ready(self) -> bool:
        """Whether `take` has something to say."""
        request = self._request
        there = len(_shown(request) if request.stop is None else request.stop.text)
        return request.is_over or there > self._num_taken

    def take(self) -> Iterator[str]:
        """What has come since the last call."""
        is_last = self._request.is_over  # before looking at the tokens: none come after it
        if self._request.stop is not None:
            text = self._request.stop.text
            if piece := text[self._num_taken :]:
                yield piece
            self._num_taken, self.is_over = len(text), is_last
            return
        shown = _shown(self._request)
        for token in shown[self._num_taken :]:
            if piece := self._text.push(token):
                yield piece
        self._num_taken = len(shown)
        if is_last:
            self.is_over = True
            if self._request.error is None and (piece := self._text.flush()):
                yield piece


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What streaming these ids would have shown."""
    stream = tokenizer.decode_stream(continues=True)
    return "".join(map(stream.push, ids)) + stream.flush()


def _shown(request: Sequence) -> list[int]:
    """Output tokens without the stop token that ended them."""
    output = request.output
    return output[:-1] if output and output[-1] in request.stop_ids else output


def _metrics(request: Sequence) -> Metrics:
    count = len(request.output)
    seconds = max(request.finished - request.first_token, 0.0) if request.first_token else 0.0
    forwards = request.num_forwards
    return Metrics(
        queue_seconds=max((request.first_served or request.finished) - request.submitted, 0.0),
        time_to_first_token=(request.first_token or time.perf_counter()) - request.submitted,
        decode_seconds=seconds,
        tokens_per_second=(count - 1) / seconds if count > 1 and seconds else 0.0,
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=min(request.num_cached, request.num_prompt),  # one that was preempted may do so again
        num_resumed_tokens=min(request.num_resumed, request.num_prompt),
        num_prefill_token_layers=request.num_token_layers,
        num_output_tokens=count,
        num_preemptions=request.num_preempted,
        num_target_forwards=forwards,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        draft_acceptance_rate=request.num_accepted / request.num_drafted if request.num_drafted else 0.0,
        mean_acceptance_length=(count - 1 - request.num_low_bit) / forwards if forwards else 0.0,
        acceptance_histogram=tuple(request.acceptance_histogram),
        num_draft_rounds=request.num_draft_rounds,
        drafters=_drafters(request),
        num_low_bit_steps=request.num_low_bit,
        num_fallbacks=request.num_fallbacks,
    )


def _drafters(request: Sequence) -> dict[str, DrafterMetrics]:
    drafts = request.drafts
    if drafts is None:
        return {}
    return {
        name: DrafterMetrics(
            num_rounds=record.num_rounds,
            num_drafted=record.num_drafted,
            num_accepted=record.num_accepted,
            draft_acceptance_rate=record.num_accepted / record.num_drafted if record.num_drafted else 0.0,
            num_catch_up=record.num_catch_up,
            seconds=record.seconds,
            num_absent=record.num_absent,
            error=record.error,
            acceptance_profile=tuple(record.profile()),
        )
        for name, record in drafts.records.items()
    }
