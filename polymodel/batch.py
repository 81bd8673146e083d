"""Batch: sequences of one model in the user's hands that prefill and decode together, one weight stream a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from operator import index
from types import TracebackType
from typing import SupportsIndex

import torch
from torch import Tensor

from polymodel.config import ModelConfig
from polymodel.errors import InvalidRequest, brief
from polymodel.events import Kind
from polymodel.sample import greedy_one
from polymodel.session import Session, check_ids, listed

Pick = Callable[[int, Tensor], int]  # row of the batch, its logits [vocab] -> token
Choose = Callable[[Tensor], int | None]


class Batch:
    """B sessions, each with pages of its own at a position of its own; `batch[i]` is one, with all its verbs.

    A verb of the batch is done for all its rows or for none. Every row gets the bits that it would get alone.
    """

    def __init__(self, rows: Sequence[Session]) -> None:
        if not rows or not all(isinstance(row, Session) for row in rows):
            raise InvalidRequest(f"a batch of {brief(rows)}, expected at least one session")
        if len({id(row) for row in rows}) < len(rows) or len({(row.model, id(row._lane)) for row in rows}) > 1:
            raise InvalidRequest("a batch is of different sessions of one model of one engine")
        self._rows = list(rows)
        self._lane = rows[0]._lane
        self._row_macs = row_macs(self._lane.residency[self.model].config)
        self.last_step_macs = 0  # multiply-accumulates of the last step's projections and heads

    @classmethod
    def from_prefix(cls, prefix: Session, size: int) -> Batch:
        """`size` rows that go on from a session's tokens; its pages are shared until one of them writes."""
        count = check_size(size)
        with ExitStack() as undo, prefix._lane.exclusive():  # so that all are clones of the same tokens
            rows = [undo.enter_context(prefix.clone()) for _ in range(count)]
            undo.pop_all()
        return cls(rows)

    def __repr__(self) -> str:
        return f"<batch of {len(self)} rows of {self.model!r}{', closed' if self.is_closed else ''}>"

    @property
    def model(self) -> str:
        """Name of the model of all rows."""
        return self._rows[0].model

    @property
    def is_closed(self) -> bool:
        """Whether all rows are closed."""
        return all(row.is_closed for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Session:
        try:
            return self._rows[row]
        except IndexError:
            raise IndexError(f"row {row} of a batch of {len(self)} rows") from None

    def __iter__(self) -> Iterator[Session]:
        return iter(self._rows)

    def prefill_each(self, prompts: Iterable[Iterable[int]]) -> Tensor:
        """Append a prompt of token ids to each row, of any lengths; logits [B, vocab] float32 after the last."""
        return torch.stack(self._together("prefill_each", self._of_each("prefill_each", prompts), "prefill"))

    def step(self, ids: Iterable[int]) -> Tensor:
        """Append one token to each row; logits [B, vocab] float32 after it."""
        return torch.stack(self._step("step", ids, range(len(self))))

    def step_active(self, ids: Iterable[int], active: Iterable[bool]) -> list[Tensor | None]:
        """`step` for the active rows alone: logits [vocab] or None a row.

        The others are left untouched, and what ids has for them is not looked at.
        """
        flags = listed(active, "step_active: the flags are", "booleans")
        if len(flags) != len(self):
            raise InvalidRequest(f"step_active: {len(flags)} flags for {len(self)} rows, expected one for each")
        rows = [i for i, is_active in enumerate(flags) if is_active]
        found = dict(zip(rows, self._step("step_active", ids, rows), strict=True))
        return [found.get(i) for i in range(len(self))]

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int,
        *,
        stop_at_eos: bool = True,
        pick: Pick | None = None,
    ) -> list[list[int]]:
        """Append a prompt to each row and the tokens chosen after it, greedily or by `pick`; those tokens, row by row.

        A row ends with a stop token, which is among its tokens, or at the limit, and the others go on without it. The
        last token of a row is not fed: the row ends up one shorter than its prompt and tokens, and `step` goes on.
        pick is called by the lane and must not wait for it.
        """
        given = self._of_each("generate", prompts)
        if not isinstance(max_new_tokens, SupportsIndex) or index(max_new_tokens) < 1:
            raise InvalidRequest(f"generate: max_new_tokens={brief(max_new_tokens)}, expected a number of at least 1")
        if pick is not None and not callable(pick):
            raise InvalidRequest(f"generate: pick={brief(pick)}, expected something to call, or None")
        most = index(max_new_tokens)
        out: list[list[int]] = [[] for _ in self._rows]

        def chooser(row: int) -> Choose:
            hosted = self._rows[row]._hosted
            stop_ids = hosted.tokenizer.stop_ids if stop_at_eos else ()

            def choose(logits: Tensor) -> int | None:
                if pick is None:
                    token = greedy_one(logits, self.model)
                else:
                    token = _picked(pick(row, logits), row, hosted.config.vocab_size)
                out[row].append(token)
                return None if len(out[row]) == most or token in stop_ids else token

            return choose

        self._together("generate", given, "prefill", chooser, most - 1)
        return out

    def close(self) -> None:
        """Close every row; if one is Busy, the others all the same."""
        with ExitStack() as rows:
            for row in self._rows:
                rows.callback(row.close)

    def __enter__(self) -> Batch:
        if self.is_closed:
            raise InvalidRequest("with: the batch is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- together

    def _of_each(self, verb: str, prompts: Iterable[Iterable[int]]) -> dict[int, list[int]]:
        rows = listed(prompts, f"{verb}: the prompts are", "prompts, each a sequence of token ids")
        given = dict(enumerate(map(listed, rows)))
        if len(given) != len(self):
            raise InvalidRequest(f"{verb}: {len(given)} prompts for {len(self)} rows, expected one for each")
        return given

    def _step(self, verb: str, ids: Iterable[int], rows: Sequence[int]) -> list[Tensor]:
        tokens = listed(ids, f"{verb}: the tokens are", "token ids, one for each row")
        if len(tokens) != len(self):
            raise InvalidRequest(f"{verb}: {len(tokens)} tokens for {len(self)} rows, expected one for each")
        logits = self._together(verb, {i: [tokens[i]] for i in rows}, "decode")
        self.last_step_macs = len(rows) * self._row_macs
        return logits

    def _together(
        self,
        verb: str,
        given: dict[int, list[int]],
        kind: Kind,
        chooser: Callable[[int], Choose] | None = None,
        num_new: int = 0,
    ) -> list[Tensor]:
        """Feed these rows at once and wait; whatever happens leaves all of them as they were."""
        if self.is_closed:
            raise InvalidRequest(f"{verb}: the batch is closed")
        rows = [self._rows[i] for i in given]
        with ExitStack() as verbs, ExitStack() as undo:
            for row in rows:
                verbs.enter_context(row._alone(verb))
            with ExitStack() as lane:
                for row in rows:
                    lane.enter_context(row._in_lane(verb))
                work = self._checked(given, chooser, num_new)
                for row in rows:
                    undo.callback(row._take_back, *row._mark())
                feeds = [row._extend(ids, kind, choose) for row, (ids, choose) in zip(rows, work, strict=True)]
            self._lane.wait_for(feeds)
            with self._lane.exclusive():
                for row in rows:
                    row._settle()
            undo.pop_all()
        return [feed.logits for feed in feeds if feed.logits is not None]

    def _checked(
        self, given: dict[int, list[int]], chooser: Callable[[int], Choose] | None, num_new: int
    ) -> list[tuple[list[int], Choose | None]]:
        """All that could refuse a row comes before the first is handed in."""
        return [
            (
                check_ids(ids, self._rows[i]._hosted.config, len(self._rows[i]), num_new),
                None if chooser is None else chooser(i),
            )
            for i, ids in given.items()
        ]


def check_size(size: int) -> int:
    if not isinstance(size, SupportsIndex) or index(size) < 1:
        raise InvalidRequest(f"a batch of {brief(size)} rows, expected a number of at least 1")
    return index(size)


def _picked(token: int, row: int, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, SupportsIndex) or not 0 <= index(token) < vocab_size:
        raise InvalidRequest(f"generate: pick gave {brief(token)} for row {row}, expected an id in 0..{vocab_size - 1}")
    return index(token)


def row_macs(config: ModelConfig) -> int:
    """Multiply-accumulates of one row's projections and head; attention and rounding rows are not among them."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    layer = config.hidden_size * (2 * heads * dim + 2 * kv_heads * dim + 3 * config.intermediate_size)
    return config.num_layers * layer + config.hidden_size * config.vocab_size
