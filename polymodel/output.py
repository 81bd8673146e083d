"""What a request gave: its text, whole or piece by piece, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from polymodel.sequence import Sequence
from polymodel.tokenizer import Tokenizer


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
    num_drafted: int
    num_accepted: int
    draft_acceptance_rate: float
    mean_acceptance_length: float  # tokens a target forward yielded
    acceptance_histogram: tuple[int, ...]  # rounds by number of accepted tokens


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


def output_of(request: Sequence, receipt: dict[str, str]) -> Output:
    """Of a request that is over."""
    return Output(
        model=request.model,
        prompt_ids=request.tokens[: request.num_prompt],
        tokens=request.output,
        text=_text(request.hosted.tokenizer, _shown(request)),
        finish_reason=request.finish_reason,
        metrics=_metrics(request),
        receipt=receipt,
    )


class Pieces:
    """The text of a request as it comes, for one reader."""

    def __init__(self, request: Sequence) -> None:
        self._request = request
        self._text = request.hosted.tokenizer.decode_stream(continues=True)
        self._num_taken = 0
        self.is_over = False

    def is_ready(self) -> bool:
        """Whether `take` has something to say."""
        return self._request.is_over or len(_shown(self._request)) > self._num_taken

    def take(self) -> Iterator[str]:
        """What has come since the last call."""
        is_last = self._request.is_over  # before looking at the tokens: none come after it
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
        mean_acceptance_length=(count - 1) / forwards if forwards else 0.0,
        acceptance_histogram=tuple(request.acceptance_histogram),
    )
