"""Session: a sequence in the user's hands. Every verb is work for the lane, done before it returns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from operator import index
from pathlib import Path
from types import TracebackType
from typing import SupportsIndex, TypeVar

from torch import Tensor

from polymodel.config import DEFAULT_DOMAIN, ModelConfig
from polymodel.errors import Busy, Contaminated, Forgotten, InvalidRequest, PromptTooLong, brief
from polymodel.events import Kind
from polymodel.kv import PageList, Swapped
from polymodel.lane import Lane
from polymodel.provisional import SINK_PARTS, Provisional, Sink, Spans
from polymodel.residency import Hosted
from polymodel.sample import greedy_one
from polymodel.sequence import Context, Feed
from polymodel.session_file import read_session, write_session

T = TypeVar("T")


class Session:
    """Tokens and their pages for one model.

    One verb at a time: a second thread's raises Busy. Evicting a span that later tokens attended leaves the session
    contaminated from there: its tokens go on, but none of them reaches a cache, a file or another session until
    `repair`. Spans are half-open slices of token positions.
    """

    def __init__(self, lane: Lane, model: str, domain: str = DEFAULT_DOMAIN) -> None:
        self._lane = lane
        self._context = Context(model=model, domain=domain, tokens=[], pages=lane.prefill.new_pages(model))
        self._logits: Tensor | None = None
        self._verb = threading.Lock()
        self._spans = Spans()
        self._sinks: list[_SessionSink] = []  # of the open spans
        self._is_provisional = False  # made of what was provisional elsewhere: reaches no cache
        self._swapped: Swapped | None = None
        self._forgotten = ""  # why, if it was
        self._is_closed = False
        self._feed: Feed | None = None  # what the lane is working on
        self._owner = f"session {next(lane.session_numbers)}"  # in the ledger
        lane.sessions.add(self)
        weakref.finalize(self, lane.orphans.append, (self._context, self._owner)).atexit = False

    def __repr__(self) -> str:
        contaminated = f", contaminated from {self.clean}" if self.is_contaminated else ""
        state = ", closed" if self._is_closed else ", swapped out" if self.is_swapped_out else ""
        return f"<{self._owner} of {self.model!r}: {len(self)} tokens{contaminated}{state}>"

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._context.model

    @property
    def domain(self) -> str:
        """Whose tokens they are."""
        return self._context.domain

    @property
    def tokens(self) -> list[int]:
        """Ids of all tokens; to be read only."""
        return self._context.tokens

    @property
    def pages(self) -> PageList:
        """Where keys and values of the tokens lie."""
        return self._context.pages

    @property
    def logits(self) -> Tensor | None:
        """[vocab] float32, after the last token; computed again, by one row, where they were not kept.

        None while there are no tokens, and where the last one is contaminated and what it gave was not kept.
        """
        if self._logits is None and self.tokens and not self.is_contaminated:
            with self._alone("logits"):
                self._restore_logits("logits")
        return self._logits

    def _restore_logits(self, verb: str) -> None:
        """By one row again; its keys and values stay, whatever happens."""
        with self._in_lane(verb):
            if self._logits is not None or not self.tokens:
                return
            self._lane.with_room(self.pages.reopen)
            feed = self._begin("decode", floor=len(self.tokens))
        self._end(feed)

    @property
    def clean(self) -> int:
        """Tokens before here are exactly what a fresh prefill of them would be."""
        return self.pages.clean if self._swapped is None else self._swapped.clean

    @property
    def is_contaminated(self) -> bool:
        """Whether tokens attended something that was evicted since."""
        return self.clean < len(self.tokens)

    @property
    def is_swapped_out(self) -> bool:
        """Whether the pages are in host memory; the next verb that needs them brings them back."""
        return self._swapped is not None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called: every other verb raises InvalidRequest."""
        return self._is_closed

    @property
    def num_cached(self) -> int:
        """Tokens whose pages were taken over from the prefix cache or another session."""
        return self._context.num_cached

    @property
    def num_resumed(self) -> int:
        """Tokens of which another model's lower layers were taken over."""
        return self._context.num_resumed

    @property
    def num_open_spans(self) -> int:
        """Provisional spans that are neither promoted nor rolled back yet."""
        return self._spans.num_open

    def __len__(self) -> int:
        return len(self.tokens)

    # ---- growing

    def append(self, ids: Iterable[int]) -> Tensor:
        """Prefill ids after what is there; logits [vocab] after the last one. KVFull changes nothing."""
        tokens = listed(ids)  # whatever it takes, before the lane is held
        with self._alone("append"):
            with self._in_lane("append"):
                feed = self._extend(tokens, "prefill")
            return self._end(feed)

    def step(self) -> int:
        """Append the greedy next token and return it."""
        with self._alone("step"):
            return self._decode("step", 1)[0]

    def generate(self, max_new_tokens: int) -> list[int]:
        """The next greedy tokens, up to a stop token or the limit; all of them end up in the session."""
        if not isinstance(max_new_tokens, SupportsIndex):
            raise InvalidRequest(f"generate({brief(max_new_tokens)}): expected a number of tokens")
        with self._alone("generate"):
            self._check_usable("generate")
            return self._decode("generate", index(max_new_tokens)) if index(max_new_tokens) > 0 else []

    def _decode(self, verb: str, count: int) -> list[int]:
        """Choose and append up to `count` tokens, one in each round that the lane decodes for this model."""
        with self._in_lane(verb):
            if not self.tokens:
                raise InvalidRequest(f"{verb}: the session is empty; append a prompt first")
            if self._logits is None and self.is_contaminated:
                raise Contaminated(
                    f"{verb}: the logits after token {len(self) - 1} were not kept, and tokens are clean up to "
                    f"{self.clean} only; append or repair first"
                )
        self._restore_logits(verb)
        out: list[int] = []
        with self._in_lane(verb):
            hosted = self._hosted
            stop_ids = hosted.tokenizer.stop_ids if verb == "generate" else ()

            def choose(logits: Tensor) -> int | None:
                if len(out) == count or (out and out[-1] in stop_ids):
                    return None
                token = greedy_one(logits, self.model)
                check_ids([token], hosted.config, len(self.tokens))
                out.append(token)
                return token

            if self._logits is None:
                raise Busy(f"{verb}: a provisional span of the session was decided while the verb ran")
            first = choose(self._logits)
            assert first is not None
            feed = self._extend([first], "decode", choose)
        self._end(feed)
        return out

    @property
    def _hosted(self) -> Hosted:
        return self._lane.residency[self.model]

    def _extend(self, ids: list[int], kind: Kind, choose: Callable[[Tensor], int | None] | None = None) -> Feed:
        """Hand ids in after what is there."""
        mark = self._mark()
        try:
            self.tokens.extend(check_ids(ids, self._hosted.config, len(self.tokens)))
            return self._begin(kind, choose)
        except BaseException:
            self._take_back(*mark)
            raise

    def _begin(
        self,
        kind: Kind,
        choose: Callable[[Tensor], int | None] | None = None,
        *,
        context: Context | None = None,
        floor: int = -1,
        looks_up: bool = True,
    ) -> Feed:
        """Hand to the lane, which is held, what is not in the pages yet; looks_up: takes over what is cached."""
        context = context or self._context
        context.has_begun = kind == "decode" or not looks_up
        feed = self._feed = Feed(into=context, kind=kind, choose=choose, floor=floor)
        self._lane.enter([feed])
        return feed

    def _end(self, feed: Feed) -> Tensor:
        """Wait until the lane is through; logits after the last token."""
        try:
            self._lane.wait_for([feed])
        finally:
            with self._lane.exclusive():
                self._settle()
        assert feed.logits is not None
        return feed.logits

    def _settle(self, error: BaseException | None = None) -> None:
        """End what the lane, which is held, is working on, and take over what it gave, as far as it came.

        Once only: later it may be of tokens that are gone.
        """
        feed, self._feed = self._feed, None
        if feed is None:
            return
        feed.fail(error or InterruptedError("the verb was interrupted"))  # unless it is over
        if (fresh := feed.into) is not self._context:  # a repair's
            if feed.error is not None or self._forgotten:
                return self._lane.prefill.drop(fresh)
            self._lane.prefill.drop(self._context)
            self._context.pages, self._context.lease = fresh.pages, fresh.lease
            self._context.num_cached += fresh.num_cached
            self._context.num_resumed += fresh.num_resumed
            for sink in self._sinks:
                sink.logits = None  # of tokens that were contaminated
        self.pages.commit(len(self.tokens) - len(self.pages))  # what was reopened
        if feed.logits is not None and not self._forgotten:
            self._logits = feed.logits
            if feed.kind == "prefill":
                self._keep()

    def _mark(self) -> tuple[int, Tensor | None, int, int]:
        """What `_take_back` brings back."""
        return len(self.tokens), self._logits, self.num_cached, self.num_resumed

    def _take_back(self, length: int, logits: Tensor | None, num_cached: int, num_resumed: int) -> None:
        """End what the lane is working on, and be what `_mark` saw; whoever was struck stays so."""
        with self._lane.exclusive():
            feed, self._feed = self._feed, None
            if feed is not None:
                feed.fail(InterruptedError("the verb was interrupted"))
            if not self._forgotten:
                self._cut(length, logits)
                self._context.num_cached, self._context.num_resumed = num_cached, num_resumed

    def _keep(self) -> None:
        """Cache what is clean, unless it may still be rolled back, here or where it came from."""
        if not (self._sinks or self._is_provisional or self._forgotten):
            self._lane.prefill.keep(self._context)

    # ---- forgetting

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens. Exact: what follows equals a session that never saw them."""
        with self._verb_of("rollback"):
            if not isinstance(count, SupportsIndex) or not 0 <= index(count) <= len(self.tokens):
                raise InvalidRequest(f"rollback({brief(count)}): the session has {len(self.tokens)} tokens")
            self._cut(len(self.tokens) - index(count))

    def _cut(self, length: int, logits: Tensor | None = None) -> None:
        """Keep the first `length` tokens, in memory or not, and these logits of the last one."""
        if length >= len(self.tokens):
            return
        if self._swapped is not None:
            self._swapped = self._swapped.cut(length)
            self._account()
        else:
            self.pages.rollback(max(len(self.pages) - length, 0))
        for sink in self._sinks:
            sink.lose(length, len(self.tokens))
        del self.tokens[length:]
        self._logits = logits

    def quarantine(self, span: slice) -> None:
        """Remove tokens that nothing attended yet, the last ones. Exact: equal to a session that never saw them.

        What the prefix cache holds of them in this domain goes as well. Contaminated if later tokens attended them.
        """
        with self._verb_of("quarantine"):
            start, stop = self._bounds("quarantine", span)
            if stop < len(self.tokens):
                raise Contaminated(
                    f"quarantine({start}, {stop}): tokens {stop}..{len(self.tokens) - 1} attended the span; "
                    "evict it, then repair"
                )
            if start < stop:
                self._lane.prefill.forget(self.model, self.tokens[: start + 1], self.domain, keep=start)
                self._cut(start)

    def evict(self, span: slice) -> None:
        """Drop tokens that later ones attended, and move those up: no bytes move.

        The later tokens remember what is gone, so the session is contaminated from `start` on; a span that ends the
        session is a rollback.
        """
        with self._verb_of("evict"):
            start, stop = self._bounds("evict", span)
            if stop == len(self.tokens):
                self._cut(start)
                return
            self.pages.evict(start, stop)
            for sink in self._sinks:
                sink.lose(start, stop)
            del self.tokens[start:stop]

    def repair(self) -> None:
        """Prefill again what attended something evicted. Exact: equal to a session that never saw it."""
        with self._alone("repair"):
            with self._in_lane("repair"):
                if not self.is_contaminated:
                    return
                tokens = list(self.tokens)
                fresh = Context(model=self.model, domain=self.domain, tokens=tokens, pages=self.pages.clone())
                fresh.pages.rollback(len(self.tokens) - self.clean)
                feed = self._begin("prefill", context=fresh)
            self._end(feed)

    def _bounds(self, verb: str, span: slice) -> tuple[int, int]:
        count = len(self.tokens)
        if isinstance(span, slice) and span.step in (None, 1):
            start, stop = (0 if span.start is None else span.start), (count if span.stop is None else span.stop)
            if all(isinstance(bound, SupportsIndex) for bound in (start, stop)):
                start, stop = index(start), index(stop)
                if 0 <= start <= stop <= count:
                    return start, stop
        raise InvalidRequest(
            f"{verb}({brief(span)}): the session has {count} tokens, "
            f"expected a slice with 0 <= start <= stop <= {count} and no step"
        )

    # ---- forking

    def clone(self) -> Session:
        """An independent session with the same tokens; the pages are shared until one of them writes."""
        with self._verb_of("clone"):
            twin = Session(self._lane, self.model, self.domain)
            twin._context.pages = self.pages.clone()
            twin.tokens.extend(self.tokens)
            twin._logits = self._logits
            twin._is_provisional = self._is_provisional or bool(self._sinks)
            return twin

    def continue_from(self, other: Session) -> None:
        """Take another session's tokens over, and what this model shares with its; this one is empty."""
        if not isinstance(other, Session) or other is self or other._lane is not self._lane:
            raise InvalidRequest("continue_from: expected another session, of the same engine")
        with self._alone("continue_from"), other._alone("continue_from"):
            if self.tokens:
                raise InvalidRequest(f"continue_from: the session has {len(self)} tokens, expected an empty one")
            mark = self._mark()
            try:
                with self._in_lane("continue_from"), other._in_lane("continue_from"):
                    tokens = check_ids(other.tokens, self._hosted.config, 0)
                    self._is_provisional = other._is_provisional or bool(other._sinks)
                    self._context.tokens = tokens
                    self._lane.prefill.take(self._context, other._context)
                    if len(self.pages) == len(tokens):
                        return self._keep()
                    feed = self._begin("prefill", floor=0, looks_up=False)
                self._end(feed)
            except BaseException:
                self._take_back(*mark)
                self._is_provisional = False
                raise

    @contextmanager
    def provisional(self, *sinks: Sink) -> Iterator[Provisional]:
        """What is appended inside is kept by `promote` and dropped by `rollback`, or at the end; sinks decide with it.

        To be used in a `with`. A sink is a polymodel.provisional.Sink, as BufferSink is, whose `effects` are what was
        promoted.

        Spans nest. Evicting tokens before or inside a span moves it along. What it holds reaches no cache before it is
        promoted, and what clones and other sessions made of it never does.
        """
        for sink in sinks:
            if missing := [part for part in SINK_PARTS if not callable(getattr(sink, part, None))]:
                raise InvalidRequest(f"provisional: {brief(sink)} is no sink, it lacks {', '.join(missing)}")
        self._check_usable("provisional")
        with self._spans.open([_SessionSink(self), *sinks]) as span:
            yield span

    # ---- leaving memory

    def swap_out(self) -> int:
        """Move the pages to (pinned) host memory; bytes moved. The next verb that needs them brings them back."""
        with self._alone("swap_out"), self._lane.exclusive():
            if self._swapped is not None:
                return 0
        with self._verb_of("swap_out"):
            self._swapped = self.pages.swap_out()
            self._lane.prefill.leave(self._context)
            self._account()
            return self._swapped.nbytes

    def swap_in(self) -> None:
        """Bring the pages back, bit for bit. CorruptSession if the host's bytes changed; KVFull changes nothing."""
        with self._verb_of("swap_in"):
            """Bringing them back is what every verb begins with."""

    def _account(self) -> None:
        held = self._swapped.nbytes if self._swapped is not None else 0
        self._lane.residency.ledger.set("host_kv", self._owner, held)

    def save(self, path: str | Path) -> None:
        """Write tokens, keys, values and logits to a safetensors file, with what they are valid for.

        Refused while tokens are contaminated or provisional: a file outlives both.
        """
        file = _path("save", path)
        with self._alone("save"):
            with self._in_lane("save"):
                if self.is_contaminated:
                    raise Contaminated(f"save: tokens are clean up to {self.clean} of {len(self)} only; repair first")
                if self._sinks or self._is_provisional:
                    raise InvalidRequest("save: tokens of an open provisional span may still be dropped; promote first")
                tokens, data, logits = list(self.tokens), self.pages.dump(), self._logits
                key = self._lane.prefill.key(self.model, self.domain)
            write_session(file, key, self.pages.layout, tokens, data, logits)

    def load(self, path: str | Path) -> None:
        """Take a saved session's place. NotShareable if any axis of its key differs, CorruptSession if its bytes do."""
        with self._verb_of("load"):
            if self.tokens:
                raise InvalidRequest(f"load: the session has {len(self.tokens)} tokens, expected an empty one")
            config = self._lane.residency[self.model].config
            key = self._lane.prefill.key(self.model, self.domain)
            saved = read_session(_path("load", path), key, self.pages.layout, config.vocab_size)
            tokens = check_ids(saved.tokens, config, 0)
            self._lane.with_room(lambda: self.pages.load(saved.data, len(tokens)))
            try:
                self.tokens.extend(tokens)
                self._logits = saved.logits
                self._keep()
            except BaseException:
                self._drop()
                raise

    def receipt(self) -> dict[str, str]:
        """What decided the bits, and up to where they are those of a fresh run."""
        self._check_usable("receipt")
        contaminated = f"from token {self.clean}" if self.is_contaminated else "no"
        return self._lane.prefill.facts(self._hosted) | {
            "kv_key": self._lane.prefill.key(self.model, self.domain).digest,
            "tokens": str(len(self.tokens)),
            "contaminated": contaminated,
        }

    def close(self) -> None:
        """Give the pages back; what is clean, and in memory, stays in the prefix cache. Once more changes nothing."""
        with self._alone("close"), self._lane.exclusive():
            self._is_closed = True
            if self._swapped is None and not self._forgotten and not self._lane.is_closed:
                self._keep()
            self._drop()

    def strike(self, why: str) -> None:
        """Give everything up; every later verb but close raises Forgotten. The lane's part, whatever verb runs."""
        self._forgotten = why
        self._settle(Forgotten(why))
        self._drop()

    def _drop(self) -> None:
        self._swapped = None
        self._account()
        self._lane.prefill.drop(self._context)
        self.tokens.clear()
        self._logits = None
        for sink in self._sinks:
            sink.lose(0, sink.start)

    @contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        if not self._verb.acquire(blocking=False):
            raise Busy(f"{verb}: the session is running another verb, expected one at a time")
        try:
            if self._feed is not None:  # of a verb that was interrupted before it could wait
                with self._lane.exclusive():
                    self._settle()
            yield
        finally:
            self._verb.release()

    def _check_usable(self, verb: str) -> None:
        if self._forgotten:
            raise Forgotten(f"{verb}: {self._forgotten}")
        if self._is_closed:
            raise InvalidRequest(f"{verb}: the session is closed")

    @contextmanager
    def _in_lane(self, verb: str) -> Iterator[None]:
        """With the lane's lock, on a session that was neither closed nor forgotten, its pages in memory."""
        with self._lane.exclusive():
            self._lane.check_open()
            self._check_usable(verb)
            if self._swapped is not None:
                swapped = self._swapped
                self._lane.with_room(lambda: self.pages.swap_in(swapped))
                self._swapped = None
                self._account()
            yield

    @contextmanager
    def _verb_of(self, name: str) -> Iterator[None]:
        with self._alone(name), self._in_lane(name):
            yield

    def __enter__(self) -> Session:
        if self._is_closed:
            raise InvalidRequest("with: the session is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _SessionSink:
    """A session as a sink of its own spans."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.start = self.stop = 0  # the span's tokens, and where what is prepared ends
        self.logits: Tensor | None = None  # before the span

    def open(self, epoch: int) -> None:
        self.start, self.logits = len(self.session), self.session._logits
        self.session._sinks.append(self)

    def lose(self, start: int, stop: int) -> None:
        """The session's tokens [start, stop) go: the span moves up, and the logits of a token that is gone are void."""
        if start < self.start <= stop:
            self.logits = None
        self.start -= min(max(self.start - start, 0), stop - start)

    def prepare(self, epoch: int, kept: int | None) -> None:
        with self.session._in_lane("promote"):
            count = len(self.session) - self.start
            if kept is not None and kept > count:
                raise InvalidRequest(f"promote: {kept} tokens to keep, the span has {count}")
            self.stop = self.start + (count if kept is None else kept)

    def commit(self, epoch: int) -> None:
        self._cut(self.stop)

    def rollback(self, epoch: int) -> None:
        self._cut(self.start)

    def _cut(self, length: int) -> None:
        """Whatever verb runs, and wherever the pages are: what cannot be cut is given up."""
        with self.session._lane.exclusive():
            self.session._settle(Busy("a provisional span of the session was decided while the verb ran"))
            try:
                self.session._cut(length, self.logits if length == self.start else None)
            except BaseException:
                self.session.strike("a provisional span could not be rolled back")
                raise

    def close(self, epoch: int) -> None:
        session = self.session
        with session._lane.exclusive():
            session._sinks.remove(self)
            if session.tokens and session._swapped is None and not session._lane.is_closed:
                session._keep()


def _path(verb: str, path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise InvalidRequest(f"{verb}: {brief(path)} is no path, expected a str or a Path")
    return Path(path)


def listed(items: Iterable[T], what: str = "the prompt is", expected: str = "token ids") -> list[T]:
    """As a list; a text, or what has no order, is refused."""
    if isinstance(items, (str, bytes, Mapping, Set)) or not isinstance(items, Iterable):
        raise InvalidRequest(f"{what} {brief(items)}, expected a sequence of {expected}")
    return list(items)


def check_ids(ids: Iterable[int], config: ModelConfig, already: int, num_new: int = 0) -> list[int]:
    """The ids as a list; refuse an empty prompt, ids outside the vocabulary, and more than the context holds."""
    tokens = listed(ids)
    if not tokens:
        raise InvalidRequest("the prompt is empty: expected at least one token")
    for i, token in enumerate(tokens):
        if type(token) is not int:
            with suppress(TypeError):
                tokens[i] = index(token)
        if isinstance(token, bool) or type(tokens[i]) is not int or not 0 <= tokens[i] < config.vocab_size:
            raise InvalidRequest(
                f"token {i} of the prompt is {brief(token)}, expected an id in 0..{config.vocab_size - 1}"
            )
    total = already + len(tokens) + num_new
    if total > config.max_context:
        raise PromptTooLong(
            f"{already + len(tokens)} prompt tokens and {num_new} new ones make {total}, "
            f"the model's context is {config.max_context}"
        )
    return tokens
