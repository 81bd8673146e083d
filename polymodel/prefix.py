"""Which prompts begin alike: radix trees over token ids, whose nodes hold runs of the arena's pages and no copies.

There is one tree for each KVKey. Its edges are cut at any token, while pages hold 64: a node that starts within a
page holds a page in which the tokens before it are stored too. So the page within which a node ends, its boundary
page, is held only by a leaf: of other nodes every child has one, and the last child to go leaves its own behind. A
conversation thus takes a page for every 64 tokens, however many its turns. Tokens are compared, never hashes. What is
counted is distinct pages: true memory. There is no lock here; the caller has one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from csrc_triton.pages import KVLayout
from polymodel.config import EVICTIONS, PAGE_TOKENS, Eviction, KVKey
from polymodel.errors import InvalidRequest
from polymodel.kv import Arena

STALE_ENTRIES = 64  # the heap may have so many, and as many as there are nodes, beside one for each node


@dataclass(slots=True, eq=False)
class _Tree:
    key: KVKey
    layout: KVLayout
    children: dict[int, _Node] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return 0


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens [start, stop) of every sequence through it, and the pages from index start // 64 on.

    A leaf has those up to its last token's, others those that are full by `stop`, which may be none.
    """

    tree: _Tree
    parent: _Node | _Tree
    start: int
    edge: array[int]
    pages: list[int]
    born: int  # order of creation
    since: float  # the clock at its last use
    hits: int = 0
    is_warm: bool = False  # prefetched, and not used yet
    is_alive: bool = True
    leases: int = 0
    children: dict[int, _Node] = field(default_factory=dict)  # by the first token of their edges

    @property
    def stop(self) -> int:
        return self.start + len(self.edge)

    @property
    def has_boundary(self) -> bool:
        """Whether it is to hold the page within which it ends."""
        return not self.children and self.stop % PAGE_TOKENS > 0

    @property
    def is_victim(self) -> bool:
        return self.is_alive and not self.leases and not self.children


class Lease:
    """Keeps a node, and so the prefix that ends in it, from being evicted; it may also be on nothing."""

    __slots__ = ("_node",)

    def __init__(self) -> None:
        self._node: _Node | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: canonical pages that cover it, and the key in whose tree it is.

    They are to be shared before anything is evicted: the lease keeps the prefix, but the last page may be a child's.
    """

    length: int
    pages: list[int]
    key: KVKey | None
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class PrefixStats:
    lookups: int  # hits + no_prefix + too_short
    hits: int
    no_prefix: int  # not one token was there
    too_short: int  # some were, fewer than min_match
    tokens_wanted: int
    tokens_matched: int
    evictions: int  # nodes, for want of room
    policy_evictions: int  # nodes, by forget, drop and clear
    splits: int
    warm_tokens: int  # prefetched, and not used yet
    nodes: int
    leaves: int
    leases: int  # those on nodes
    tokens: int
    pages: int
    nbytes: int
    max_depth: int  # tokens


class PrefixCache:
    """Prefixes and their pages, within `max_bytes` and `max_tokens` unless what is leased exceeds them.

    Victims are leaves without a lease, prefetched ones first. "lru" takes the least recently used. "cost" is
    GreedyDual-Size-Frequency (Cherkasova 1998): the lowest of clock + (1 + hits) * tokens / slots, with the clock of
    the node's last use, and the clock being the score of the last victim; tokens are what computing it again would
    cost, and slots what its pages hold.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        max_bytes: int,
        max_tokens: int | None = None,
        policy: Eviction = "lru",
        min_match: int = 1,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        if policy not in EVICTIONS:
            raise InvalidRequest(f"prefix cache: policy is {policy!r}, expected one of {', '.join(EVICTIONS)}")
        if min_match < 1:
            raise InvalidRequest(f"prefix cache: min_match is {min_match}, expected at least 1")
        self.arena = arena
        self.max_bytes = max_bytes
        self.max_tokens = max_tokens
        self.policy = policy
        self.min_match = min_match
        self.on_change = on_change
        self._trees: dict[KVKey, _Tree] = {}
        self._holders: Counter[int] = Counter()  # page id -> nodes that hold it
        self._heap: list[
            tuple[float, int, _Node]
        ] = []  # score, born; valid while both are the node's and it is a victim
        self._clock = 0.0
        self._born = 0
        self._nbytes = self._reported = 0
        self._num_nodes = self._num_tokens = self._warm_tokens = 0
        self._lookups = self._hits = self._no_prefix = self._tokens_wanted = self._tokens_matched = 0
        self._evictions = self._policy_evictions = self._splits = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct pages held, as told last: until a call that changes them is done, those before it."""
        return self._reported

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def keys(self) -> list[KVKey]:
        """Those of which anything is cached."""
        return list(self._trees)

    @property
    def num_tokens(self) -> int:
        """The sum of all edges."""
        return self._num_tokens

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def stats(self) -> PrefixStats:
        nodes = list(self._nodes())
        return PrefixStats(
            lookups=self._lookups,
            hits=self._hits,
            no_prefix=self._no_prefix,
            too_short=self._lookups - self._hits - self._no_prefix,
            tokens_wanted=self._tokens_wanted,
            tokens_matched=self._tokens_matched,
            evictions=self._evictions,
            policy_evictions=self._policy_evictions,
            splits=self._splits,
            warm_tokens=self._warm_tokens,
            nodes=self._num_nodes,
            leaves=sum(not node.children for node in nodes),
            leases=sum(node.leases for node in nodes),
            tokens=self._num_tokens,
            pages=self.num_pages,
            nbytes=self._nbytes,
            max_depth=max((node.stop for node in nodes), default=0),
        )

    def match(self, keys: Sequence[KVKey], tokens: Sequence[int]) -> Match:
        """The longest prefix in any of these keys' trees, the first's on a tie, with a lease on where it ends."""
        ids = _ids(tokens)
        key, path, length = self._longest(keys, ids)
        self._lookups += 1
        self._tokens_wanted += len(ids)
        self._no_prefix += not length
        lease = Lease()
        if length < self.min_match:
            return Match(0, [], None, lease)
        self._hits += 1
        self._tokens_matched += length
        self._use(path)
        for node in path:
            node.hits += 1
        self._move(lease, path[-1])
        return Match(length, _pages(path, length), key, lease)

    def peek(self, keys: Sequence[KVKey], tokens: Sequence[int]) -> Match:
        """What `match` would find. Nothing changes, and there is no lease."""
        key, path, length = self._longest(keys, _ids(tokens))
        return Match(length, _pages(path, length), key, None) if length >= self.min_match else Match(0, [], None, None)

    def insert(
        self,
        key: KVKey,
        layout: KVLayout,
        tokens: Sequence[int],
        pages: Sequence[int],
        lease: Lease | None = None,
        *,
        warm: bool = False,
    ) -> Lease:
        """Enter a sequence with its canonical pages, hold those of its missing suffix, and move the lease to its end.

        What is there stays as it is. Warm, for what was prefetched: the first to go until it is used, and not leased.
        """
        ids = _ids(tokens)
        if len(pages) != _num_pages(len(ids)):
            raise InvalidRequest(
                f"prefix cache: {len(pages)} pages for {len(ids)} tokens, expected {_num_pages(len(ids))}: "
                f"one for every {PAGE_TOKENS}"
            )
        tree = self._trees.get(key)
        if tree and tree.layout != layout:
            raise InvalidRequest(f"prefix cache: pages of {layout}, expected this key's {tree.layout}")
        path, length = self._walk(key, ids)
        missing = list(pages[length // PAGE_TOKENS :]) if length < len(ids) else []
        if lost := [page for page in missing if not self.arena.num_owners(page)]:
            raise InvalidRequest(f"prefix cache: nobody owns the pages {lost}")
        if not warm:
            self._use(path)
        end = path[-1] if path else None
        if missing:
            if tree is None:
                tree = self._trees[key] = _Tree(key, layout)
            if end and length < end.stop:
                end = self._split(end, length)
            end = self._attach(tree, end or tree, ids[length:], missing, warm)
        lease = lease or Lease()
        self._move(lease, None if warm else end)
        self._settle()
        return lease

    def hold(self, key: KVKey, tokens: Sequence[int]) -> Lease:
        """A lease on as much of these tokens as is cached; it is no use of them."""
        path, _ = self._walk(key, _ids(tokens))
        lease = Lease()
        self._move(lease, path[-1] if path else None)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease; once more is no error."""
        self._move(lease, None)
        self._settle()

    def forget(self, key: KVKey, tokens: Sequence[int], keep: int = 0) -> int:
        """Evict every node that has all of `tokens` as its prefix, recently used, leased or not; tokens freed.

        The edge in which they end goes as a whole, but for what it has of their first `keep`. Where the cached path
        ends before them, all of it stays.
        """
        ids = _ids(tokens)
        path, length = self._walk(key, ids)
        if not ids or length < len(ids):
            return 0
        node = path[-1]
        if node.start < min(keep, length - 1) < node.stop:
            self._split(node, min(keep, length - 1))
        return self._expel([[node]])

    def drop(self, domain: str) -> int:
        """Evict everything of a domain, leased or not; tokens freed."""
        return self._expel([[*tree.children.values()] for key, tree in self._trees.items() if key.domain == domain])

    def clear(self) -> int:
        """Evict everything, leased or not; tokens freed."""
        return self._expel([[*tree.children.values()] for tree in self._trees.values()])

    def reclaim(self, layout: KVLayout, count: int) -> None:
        """Evict until so many pages of this layout are free, or no victim is left."""
        while self.arena.num_free(layout) < count and self._evict():
            pass
        self._settle()

    def check(self) -> None:
        """Every invariant, for tests."""
        nodes = list(self._nodes())
        assert all(tree.children and tree.key == key for key, tree in self._trees.items())
        holders: Counter[int] = Counter()
        page_bytes: dict[int, int] = {}
        for node in nodes:
            assert node.is_alive and node.edge and node.leases >= 0
            assert node.start == node.parent.stop and node.parent.children[node.edge[0]] is node
            stop = node.stop // PAGE_TOKENS if node.children else _num_pages(node.stop)
            assert len(node.pages) == stop - node.start // PAGE_TOKENS
            holders.update(node.pages)
            page_bytes |= dict.fromkeys(node.pages, node.tree.layout.page_bytes)
        assert holders == self._holders and self._nbytes == sum(page_bytes.values()) == self._reported
        assert all(self.arena.num_owners(page) >= count for page, count in holders.items())
        assert self._num_nodes == len(nodes) and self._num_tokens == sum(len(node.edge) for node in nodes)
        assert self._warm_tokens == sum(len(node.edge) for node in nodes if node.is_warm)
        entries = {(score, node) for score, _, node in self._heap}
        victims = [node for node in nodes if node.is_victim]
        assert all((self._score(node), node) in entries for node in victims), "a victim is in no entry"
        assert len(self._heap) <= 2 * self._num_nodes + STALE_ENTRIES
        assert not (self._is_over and victims)

    # ---- walking -------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[_Node]:
        todo: list[_Node | _Tree] = list(self._trees.values())
        while todo:
            children = todo.pop().children.values()
            yield from children
            todo += children

    def _walk(self, key: KVKey, ids: array[int]) -> tuple[list[_Node], int]:
        """The nodes that hold the longest prefix of `ids`, the last of them perhaps in part, and its length."""
        at: _Node | _Tree | None = self._trees.get(key)
        path: list[_Node] = []
        length = 0
        while at and length < len(ids) and (node := at.children.get(ids[length])):
            path.append(node)
            length += common_length(node.edge, ids, length)
            at = node if length == node.stop else None
        return path, length

    def _longest(self, keys: Sequence[KVKey], ids: array[int]) -> tuple[KVKey | None, list[_Node], int]:
        best: tuple[KVKey | None, list[_Node], int] = None, [], 0
        for key in keys:
            path, length = self._walk(key, ids)
            if length > best[2]:
                best = key, path, length
        return best

    # ---- nodes ---------------------------------------------------------------------------------------

    def _attach(self, tree: _Tree, parent: _Node | _Tree, edge: array[int], pages: list[int], warm: bool) -> _Node:
        node = _Node(tree, parent, parent.stop, edge, pages, self._born, self._clock, is_warm=warm)
        self._hold(tree.layout, pages)
        if isinstance(parent, _Node) and parent.has_boundary:
            self._let_go(tree.layout, [parent.pages.pop()])
        parent.children[edge[0]] = node
        self._born += 1
        self._num_nodes += 1
        self._num_tokens += len(edge)
        self._warm_tokens += len(edge) * warm
        if warm:
            self._offer(node)
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node's edge before position `at`: the new node of the part before; a page that is cut stays below."""
        count, page = at - node.start, at // PAGE_TOKENS - node.start // PAGE_TOKENS
        upper = _Node(
            *(node.tree, node.parent, node.start, node.edge[:count], node.pages[:page], self._born, node.since),
            hits=node.hits,
            is_warm=node.is_warm,
        )
        upper.children[node.edge[count]] = node
        node.parent.children[node.edge[0]] = upper
        node.parent, node.start, node.edge, node.pages = upper, at, node.edge[count:], node.pages[page:]
        self._born += 1
        self._num_nodes += 1
        self._splits += 1
        self._offer(node)
        return upper

    def _remove(self, siblings: Sequence[_Node]) -> int:
        """Take these branches out of their tree; tokens freed."""
        tree, parent = siblings[0].tree, siblings[0].parent
        for node in siblings:
            del parent.children[node.edge[0]]
        pages: list[int] = []
        freed = 0
        todo = list(siblings)
        while todo:
            node = todo.pop()
            todo += node.children.values()
            node.is_alive = False
            pages += node.pages
            freed += len(node.edge)
            self._num_nodes -= 1
            self._warm_tokens -= len(node.edge) * node.is_warm
        self._num_tokens -= freed
        if isinstance(parent, _Node):
            if parent.has_boundary:
                parent.pages.append(_first_page(siblings[0]))
                self._hold(tree.layout, parent.pages[-1:])
            self._offer(parent)
        elif not parent.children:
            del self._trees[tree.key]
        self._let_go(tree.layout, pages)
        return freed

    def _expel(self, families: Sequence[Sequence[_Node]]) -> int:
        """Remove these siblings, by policy and not for want of room."""
        before = self._num_nodes
        freed = sum(self._remove(siblings) for siblings in families)
        self._policy_evictions += before - self._num_nodes
        self._settle()
        return freed

    def _use(self, path: Sequence[_Node]) -> None:
        self._clock += self.policy == "lru"
        for node in path:
            node.since = self._clock
            self._warm_tokens -= len(node.edge) * node.is_warm
            node.is_warm = False

    def _move(self, lease: Lease, node: _Node | None) -> None:
        """Lease this node in place of the present one."""
        before, lease._node = lease._node, node
        if node:
            node.leases += 1
        if before:
            before.leases -= 1
            self._offer(before)

    # ---- pages ---------------------------------------------------------------------------------------

    def _hold(self, layout: KVLayout, pages: Sequence[int]) -> None:
        self.arena.share(pages)
        before = len(self._holders)
        for page in pages:
            self._holders[page] += 1
        self._nbytes += (len(self._holders) - before) * layout.page_bytes

    def _let_go(self, layout: KVLayout, pages: Sequence[int]) -> None:
        self.arena.release(layout, pages)
        before = len(self._holders)
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
        self._nbytes += (len(self._holders) - before) * layout.page_bytes

    # ---- eviction ------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._nbytes > self.max_bytes or (self.max_tokens is not None and self._num_tokens > self.max_tokens)

    def _settle(self) -> None:
        """Back within the bounds, and say so if the bytes have changed."""
        while self._is_over and self._evict():
            pass
        if self._nbytes != self._reported:
            self._reported = self._nbytes
            if self.on_change:
                self.on_change()

    def _score(self, node: _Node) -> float:
        """The lowest goes first."""
        if node.is_warm:
            return -1.0
        if self.policy == "lru":
            return node.since
        return node.since + (1 + node.hits) * len(node.edge) / (PAGE_TOKENS * len(node.pages))

    def _offer(self, node: _Node) -> None:
        """Enter a node as it is now, if it is a victim; entries of what it was before are skipped when they come up."""
        if node.is_victim:
            heappush(self._heap, (self._score(node), node.born, node))
        if len(self._heap) > 2 * self._num_nodes + STALE_ENTRIES:
            self._heap = [(self._score(node), node.born, node) for node in self._nodes() if node.is_victim]
            heapify(self._heap)

    def _evict(self) -> bool:
        """Remove the victim with the lowest score; False if there is none."""
        while self._heap:
            score, _, node = heappop(self._heap)
            if node.is_victim and score == self._score(node):
                if self.policy == "cost":
                    self._clock = max(self._clock, score)
                self._remove([node])
                self._evictions += 1
                return True
        return False


def _ids(tokens: Sequence[int]) -> array[int]:
    try:
        return array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"prefix cache: tokens must be integers below 2**31: {error}") from error


def _num_pages(length: int) -> int:
    return -(-length // PAGE_TOKENS)


def common_length(one: Sequence[int], other: Sequence[int], at: int = 0) -> int:
    """How many tokens `one`, and `other` from `at` on, begin with alike; slices are compared in C."""
    count = min(len(one), len(other) - at)
    if one[:count] == other[at : at + count]:
        return count
    low, high = 0, count  # the first `low` agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def _first_page(node: _Node) -> int:
    """The page of index start // 64; where a node is not a leaf and ends within it, its first child's."""
    while not node.pages:
        node = next(iter(node.children.values()))
    return node.pages[0]


def _pages(path: Sequence[_Node], length: int) -> list[int]:
    """One for each index; a page within which the last node ends is its first child's, if it has children."""
    pages: list[int] = []
    for node in path:
        pages += node.pages
    if len(pages) < _num_pages(length):
        pages.append(_first_page(next(iter(path[-1].children.values()))))
    return pages[: _num_pages(length)]
