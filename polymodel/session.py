"""Session: a sequence in the user's hands. Every verb is work for the lane, done before it returns."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import TracebackType

from torch import Tensor

from polymodel.config import ModelConfig
from polymodel.errors import InvalidRequest, PromptTooLong
from polymodel.kv import PageList
from polymodel.lane import Lane
from polymodel.model import Panel, forward
from polymodel.sample import greedy_one


class Session:
    """Tokens and their pages for one model. `logits` [vocab] float32 are those after the last token."""

    def __init__(self, lane: Lane, model: str, pages: PageList | None = None) -> None:
        self._lane = lane
        self.model = model
        self.pages = pages if pages is not None else PageList(lane.arena, lane.residency[model].layout)
        self.tokens: list[int] = []
        self.logits: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, ids: Seq[int]) -> Tensor:
        """Prefill ids after what is there; logits [vocab] after the last one. KVFull changes nothing."""
        self._lane.check_open()
        config = self._lane.residency[self.model].config
        check_ids(ids, config, len(self.tokens))
        with self._lane.lock, self._lane.residency.lease(self.model) as model:
            before, chunk = len(self.pages), self._lane.config.prefill_chunk
            try:
                for start in range(0, len(ids), chunk):
                    part = ids[start : start + chunk]
                    with self._lane.events.span("prefill", self.model, tokens=len(part), sequences=1):
                        logits = forward(model, self._lane.arena, Panel([self.pages], [part]))
            except BaseException:
                self.pages.rollback(len(self.pages) - before)
                raise
            self.tokens += ids
            self.logits = logits[0]
        return self.logits

    def step(self) -> int:
        """Append the greedy next token and return it."""
        if self.logits is None:
            raise InvalidRequest("step: the session is empty; append a prompt first")
        token = greedy_one(self.logits, self.model)
        self.append([token])
        return token

    def generate(self, max_new_tokens: int) -> list[int]:
        """The next greedy tokens, up to a stop token or the limit; all of them end up in the session."""
        stop = set(self._lane.residency[self.model].tokenizer.stop_ids)
        out: list[int] = []
        while len(out) < max_new_tokens and not (out and out[-1] in stop):
            out.append(self.step())
        return out

    def clone(self) -> Session:
        """An independent session with the same tokens; the pages are shared until one of them writes."""
        with self._lane.lock:
            twin = Session(self._lane, self.model, self.pages.clone())
        twin.tokens, twin.logits = list(self.tokens), self.logits
        return twin

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens. Exact: what follows equals a session that never saw them."""
        if not 0 <= count <= len(self.tokens):
            raise InvalidRequest(f"rollback({count}): the session has {len(self.tokens)} tokens")
        if not count:
            return
        with self._lane.lock:
            last = self.tokens[-count - 1] if count < len(self.tokens) else None
            self.pages.rollback(min(count + 1, len(self.tokens)))
            del self.tokens[-count - 1 :]
            self.logits = None
            if last is not None:  # its logits were not kept; one row brings them back
                self.append([last])

    def close(self) -> None:
        """Give the pages back."""
        with self._lane.lock:
            self.pages.free()
        self.tokens, self.logits = [], None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_ids(ids: Seq[int], config: ModelConfig, already: int, num_new: int = 0) -> None:
    """Refuse an empty prompt, ids outside the vocabulary, and more tokens than the context holds."""
    if not ids:
        raise InvalidRequest("the prompt is empty: expected at least one token")
    for i, token in enumerate(ids):
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise InvalidRequest(f"token {i} of the prompt is {token!r}, expected an id in 0..{config.vocab_size - 1}")
    total = already + len(ids) + num_new
    if total > config.max_context:
        raise PromptTooLong(
            f"{already + len(ids)} prompt tokens and {num_new} new ones make {total}, "
            f"the model's context is {config.max_context}"
        )
