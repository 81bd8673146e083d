"""GGUF metadata or the content of a tokenizer.json -> a checked Spec -> vocabulary.

A Spec is built like a tokenizer.json; that of a GGUF is like the one the file was made from. Splits
and merges are those of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from polymodel.errors import CorruptCheckpoint, PolymodelError, UnsupportedModel

# like a tokenizer.json, but added tokens are in the vocabulary and merges are pairs of its pieces
Spec = dict[str, Any]

# kinds of token, numbered as in GGUF
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)

MAX_IDS = 1 << 24  # bounds what a false id can make us allocate

# control tokens that some converters call user-defined
_LOOKS_CONTROL = re.compile(r"<([|\uff5c]).*\1>|<((start|end)_of_turn|unused\d+|pad|mask)>")
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> regexes that split a text, each inside the pieces of the one before
_SPLITS = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "llama-bpe": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "tekken": (_TEKKEN,),
}
# here a split piece that is a token needs no merges, and BOS comes first unless the file says not
_WHOLE_PIECES = ("llama-bpe", "llama-v3", "llama3", "tekken")

# character of a byte-level piece -> its byte: the printable ones stand for themselves
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
BYTE_OF = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class GgufFields:
    """The keys tokenizer.* of a GGUF header, with their types checked."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata, self.source = metadata, source

    def one(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.{key}", default)
        if value is not default and type(value) is not kind:
            raise CorruptCheckpoint(f"{self.source}: tokenizer.{key} is {value!r:.80}")
        return value

    def many(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values: list[Any] = self.one(key, list, [])
        for at, value in enumerate(values):
            if type(value) is not kind:
                raise CorruptCheckpoint(f"{self.source}: tokenizer.{key}[{at}] is {value!r:.80}")
        if length not in (None, len(values)):
            raise CorruptCheckpoint(f"{self.source}: {length} tokens, but {len(values)} in tokenizer.{key}")
        return values

    def add_bos(self) -> bool:
        """Whether a text starts with BOS; without the key, what llama.cpp does."""
        usual = self.one("ggml.model", str) == "llama" or self.one("ggml.pre", str) in _WHOLE_PIECES
        known = self.one("ggml.bos_token_id", int) is not None
        return bool(self.one("ggml.add_bos_token", bool, usual and known))


def spec_from_gguf(fields: GgufFields) -> Spec:
    """Raises CorruptCheckpoint for contradictions, UnsupportedModel for an unknown kind."""
    source = fields.source
    model, pre = fields.one("ggml.model", str), fields.one("ggml.pre", str)
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{source}: tokenizer model {model!r}; known: gpt2, llama")
    if model == "gpt2" and pre not in _SPLITS:
        raise UnsupportedModel(f"{source}: pre-tokenizer {pre!r}; known: {', '.join(_SPLITS)}")
    pieces = fields.many("ggml.tokens", str)
    kinds = fields.many("ggml.token_type", int, len(pieces))
    vocab: dict[str, int] = {}
    for at, piece in enumerate(pieces):
        if kinds[at] != UNUSED and vocab.setdefault(piece, at) != at:
            raise CorruptCheckpoint(f"{source}: ids {vocab[piece]} and {at} are both {piece!r}")
    added = [
        added_token(piece, at, special=kinds[at] != USER)
        for piece, at in vocab.items()
        if kinds[at] in (UNKNOWN, CONTROL, USER)
    ]
    spec: Spec = {"added_tokens": added}
    if model == "gpt2":
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in _SPLITS[pre]
        ]
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        to_bytes["trim_offsets"] = False
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}
        spec["decoder"] = {**to_bytes, "type": "ByteLevel"}
        with well_formed(source):
            merges = _merge_pairs(fields.many("ggml.merges", str), vocab, added)
        spec["model"] = {"ignore_merges": pre in _WHOLE_PIECES}
    else:
        normal = {piece: at for piece, at in vocab.items() if kinds[at] == NORMAL}
        merges = _merges_by_score(normal, fields.many("ggml.scores", float, len(pieces)))
        unknown = fields.one("ggml.unknown_token_id", int, 0)
        if not 0 <= unknown < len(pieces):
            raise CorruptCheckpoint(f"{source}: unknown id {unknown} of {len(pieces)} ids")
        to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        from_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        normalizers = [from_space]
        decoders = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if fields.one("ggml.add_space_prefix", bool, True):
            normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        spec["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
        spec["decoder"] = {"type": "Sequence", "decoders": decoders}
        spec["model"] = {"unk_token": pieces[unknown], "byte_fallback": True}
    spec["model"] |= {"vocab": vocab, "merges": merges}
    return spec


def added_token(piece: str, at: int, special: bool) -> Spec:
    """An entry of added_tokens: its text is found before anything else is done to a text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": at, "content": piece, "special": special, **flags}


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece as merges: it joins the two neighbours whose joint piece has the best score."""
    best_first = sorted(vocab, key=lambda piece: -scores[vocab[piece]])
    return [
        (left, right)
        for piece in best_first
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]


def spec_from_json(content: Any) -> Spec:
    """Raises UnsupportedModel, or anything at all where the content is malformed."""
    model, added = content["model"], content.get("added_tokens") or []
    affix = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or affix:
        raise UnsupportedModel(f"tokenizer {model.get('type')!r} with affix {affix!r}; known: BPE")
    vocab = dict(model["vocab"])
    for token in added:
        piece, at = token["content"], token["id"]
        if vocab.setdefault(piece, at) != at:
            raise ValueError(f"{piece!r:.80} has the ids {vocab[piece]} and {at}")
    for piece, at in vocab.items():
        if type(at) is not int or not 0 <= at < MAX_IDS:
            raise ValueError(f"{piece!r:.80} has the id {at!r}")
    if not vocab or len(set(vocab.values())) < len(vocab):
        raise ValueError(f"{len(vocab)} tokens, but {len(set(vocab.values()))} ids")
    model = {**model, "vocab": vocab, "merges": _merge_pairs(model["merges"], vocab, added)}
    return {**content, "added_tokens": added, "model": model}


@contextmanager
def well_formed(source: str) -> Iterator[None]:
    """A file may hold anything: what is raised where it is not as expected, made typed."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: {error}") from None
    except PolymodelError:
        raise
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CorruptCheckpoint(f"{source}: tokenizer: {error!r:.200}") from error


def _merge_pairs(merges: Collection[Any], vocab: dict[str, int], added: list[Spec]) -> list[tuple[str, str]]:
    """Without those that would make a control token out of ordinary text."""
    pairs = [m.partition(" ")[::2] if isinstance(m, str) else (m[0], m[1]) for m in merges]
    for left, right in pairs:
        # the tokenizers package panics on some of these
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"merge {left!r:.80} {right!r:.80} names a piece that is no token")
    controls = {token["content"] for token in added if _is_control(token)}
    return [pair for pair in pairs if controls.isdisjoint((*pair, pair[0] + pair[1]))]


def _is_control(token: Spec) -> bool:
    return bool(token["special"] or _LOOKS_CONTROL.fullmatch(token["content"]))


def read_vocabulary(spec: Spec, min_rows: int) -> tuple[list[str], list[int]]:
    """(id -> piece, id -> kind); ids without a piece are UNUSED."""
    vocab, has_bytes = spec["model"]["vocab"], bool(spec["model"].get("byte_fallback"))
    unknown = spec["model"].get("unk_token")
    if min_rows > MAX_IDS or (unknown is not None and unknown not in vocab):
        raise ValueError(f"{min_rows} rows, or unknown token {unknown!r:.80} is not there")
    pieces = [""] * max(min_rows, 1 + max(vocab.values()))
    kinds = [UNUSED] * len(pieces)
    for piece, at in vocab.items():
        pieces[at] = piece
        is_byte = has_bytes and len(piece) == 6 and _BYTE_PIECE.match(piece)
        kinds[at] = BYTE if is_byte else NORMAL
    for token in spec["added_tokens"]:
        kinds[token["id"]] = CONTROL if _is_control(token) else USER
    return pieces, kinds


def read_decoder(spec: Spec) -> tuple[bool, bool]:
    """(are pieces byte-level?, does decoding drop a leading space?)"""
    decoder = spec["decoder"] or {}
    parts = {part["type"]: part for part in (decoder, *decoder.get("decoders", ()))}
    if "ByteLevel" in parts:
        return True, False
    if not parts.keys() & {"ByteFallback", "Metaspace"}:
        raise UnsupportedModel(f"decoder {[*parts]}; known: ByteLevel, ByteFallback, Metaspace")
    prepends = parts.get("Metaspace", {"prepend_scheme": "never"}).get("prepend_scheme", "always")
    return False, "Strip" in parts or prepends != "never"


def piece_bytes(piece: str, kind: int, byte_level: bool) -> bytes:
    """What a token stands for; a control token's is its name, that of padding is empty."""
    if kind == BYTE:
        return bytes([int(piece[3:5], 16)])
    if kind == CONTROL or (byte_level and kind == USER):
        return piece.encode()
    if not byte_level:
        return piece.replace("▁", " ").encode()
    try:
        return bytes(map(BYTE_OF.__getitem__, piece))
    except KeyError:  # not in the alphabet, so it is meant as it stands
        return piece.encode()
