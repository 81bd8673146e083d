"""Text <-> token ids, chat messages -> ids, and the digest that tells equal vocabularies.

Two Hugging Face tokenizers with the same merges stand behind a Tokenizer: one reads control tokens
such as <|im_end|> in a text, the other cannot make one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import operator
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymodel.chat_template import ChatTemplate
from polymodel.errors import CorruptCheckpoint, InvalidRequest
from polymodel.tokenizer_spec import (
    CONTROL,
    UNUSED,
    GgufFields,
    Spec,
    added_token,
    piece_bytes,
    read_decoder,
    read_vocabulary,
    spec_from_gguf,
    spec_from_json,
    well_formed,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine
    from tokenizers.models import BPE

# a role may become part of a control token, as in <|user|>; so it must be one of these
ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")

# control tokens that end an answer, whatever the file calls its EOS
ENDS = (
    *("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)


class Tokenizer:
    """A vocabulary and what turns text into its ids. Does not change; any thread may use it."""

    def __init__(
        self,
        spec: Spec,  # the content of a tokenizer.json
        source: str,  # named in errors
        *,
        min_rows: int = 0,  # ids up to here exist, if only as padding
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        end_ids: Sequence[int] = (),  # further ids that end an answer
        add_bos: bool | None = None,  # None: what the spec's post-processor does
        chat_template: str | None = None,
    ) -> None:
        self.source, self.bos_id, self.eos_ids = source, bos_id, tuple(eos_ids)
        self.chat_template = chat_template or None
        with well_formed(source):
            self._pieces, self._kinds = read_vocabulary(spec, min_rows)
            self._byte_level, self._strips_space = read_decoder(spec)
            self._controls = {piece: at for at, piece in enumerate(self._pieces) if self._kinds[at] == CONTROL}
            model, added = spec["model"], spec["added_tokens"]
            merger = _merger(model)
            self._special = _engine(spec, merger, added)
            if model.get("ignore_merges") or any(len(piece) == 1 for piece in self._controls):
                # text is looked up as it stands, so what it must not become cannot be there
                banned = self._controls.keys() - {model.get("unk_token")}
                vocab = {piece: at for piece, at in model["vocab"].items() if piece not in banned}
                merger = _merger({**model, "vocab": vocab})
            ordinary = [token for token in added if token["content"] not in self._controls]
            self._plain = _engine({**spec, "post_processor": None}, merger, ordinary)
        self.vocab_size = len(self._pieces)
        for at in [*eos_ids, *end_ids] + [bos_id] * (bos_id is not None):
            if not isinstance(at, int) or not 0 <= at < self.vocab_size:
                raise CorruptCheckpoint(f"{source}: BOS or EOS id {at!r} of {self.vocab_size} ids")
        if add_bos and bos_id is None:
            raise CorruptCheckpoint(f"{source}: says to add a BOS token, but names none")
        if add_bos is None:
            add_bos = bos_id is not None and self._special.encode("").ids[:1] == [bos_id]
        self._add_bos = add_bos
        ends = (self._controls[piece] for piece in ENDS if piece in self._controls)
        self.stop_ids = frozenset(chain(self.eos_ids, end_ids, ends))
        self._template = ChatTemplate(chat_template, source) if chat_template else None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """From the keys tokenizer.* of a GGUF header."""
        fields = GgufFields(metadata, source)
        spec = spec_from_gguf(fields)
        bos, eos, eot, eom = (fields.one(f"ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom"))
        return cls(
            spec,
            source,
            min_rows=len(fields.many("ggml.tokens", str)),
            bos_id=bos,
            eos_ids=[] if eos is None else [eos],
            end_ids=[at for at in (eot, eom) if at is not None],
            add_bos=fields.add_bos(),
            chat_template=fields.one("chat_template", str),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json and, where they are there, the files that lie beside it."""

        def read(name: str, required: bool = False) -> dict[str, Any]:
            path = folder / name
            if not path.is_file() and not required:
                return {}
            try:
                content = json.loads(path.read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                raise CorruptCheckpoint(f"{path}: {error}") from error
            if not isinstance(content, dict):
                raise CorruptCheckpoint(f"{path}: holds no JSON object")
            return content

        content, settings = read("tokenizer.json", required=True), read("tokenizer_config.json")
        config, generation = read("config.json"), read("generation_config.json")
        source = str(folder)
        with well_formed(source):
            spec = spec_from_json(content)
            bos, eos = (
                spec["model"]["vocab"].get(token["content"] if isinstance(token, dict) else token)
                for token in (settings.get("bos_token"), settings.get("eos_token"))
            )
            eos_ids = [] if eos is None else [eos]
            for more in (generation.get("eos_token_id"), config.get("eos_token_id")):
                eos_ids += more if isinstance(more, list) else [more] * (more is not None)
            template = (read("chat_template.json") or settings).get("chat_template")
            if isinstance(template, list):  # several, by name
                template = {t["name"]: t["template"] for t in template}.get("default")
            if (folder / "chat_template.jinja").is_file():
                template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            add_bos = settings.get("add_bos_token")
            if not isinstance(template, str | None) or not isinstance(add_bos, bool | None):
                raise TypeError(f"chat_template {template!r:.40}, add_bos_token {add_bos!r:.40}")
            return cls(
                spec,
                source,
                min_rows=config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0),
                bos_id=bos,
                eos_ids=list(dict.fromkeys(eos_ids)),
                add_bos=add_bos,
                chat_template=template,
            )

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of a text. Control tokens in it are ordinary characters unless parse_special.

        add_bos=None does what the model was trained with.
        """
        engine = self._special if parse_special else self._plain
        try:
            ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # so it calls a lone surrogate, too
            raise InvalidRequest(f"text to encode is no valid Unicode string: {error}") from error
        if not (self._add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise InvalidRequest(f"add_bos, but {self.source} has no BOS token")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        stream = self.decode_stream(skip_special=skip_special)
        return "".join(map(stream.push, ids)) + stream.flush()

    def decode_stream(self, *, skip_special: bool = True, continues: bool = False) -> DecodeStream:
        """decode() in steps. continues: text comes before, so a leading space belongs to it."""
        return DecodeStream(self, skip_special, self._strips_space and not continues)

    def token_bytes(self, token_id: int) -> bytes:
        """What an id stands for; a control token's is its name, that of padding is empty."""
        return self._bytes[self._checked_id(token_id)]

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token, which decode() leaves out."""
        return self._kinds[self._checked_id(token_id)] == CONTROL

    def vocab_digest(self) -> str:
        """blake2b of every used id with its bytes; equal digests mean that ids can be exchanged."""
        return self._digest

    def first_difference(self, other: Tokenizer) -> int | None:
        """The lowest id that means different things; None if and only if the digests are equal."""
        rows = zip_longest(self._meanings(), other._meanings())
        return next((at for at, (mine, theirs) in enumerate(rows) if mine != theirs), None)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, in which no message can forge a control token.

        Rendered twice: as it is, and with stand-ins in the messages for all characters that control
        tokens consist of, so that those left are the template's. If both texts show the same ones
        and no message names any, the result is encode(rendered, parse_special=True, add_bos=False).
        Otherwise the second text says which control tokens there are, all else is spelled out in
        ordinary tokens, and what the template looks for in the messages it will not have found.
        """
        if self._template is None:
            raise InvalidRequest(f"{self.source} holds no chat template; give a prompt instead")
        real = _checked_messages(messages)
        texts = [text for message in real for key, text in message.items() if key != "role"]
        taken = set(self._template.text).union(*texts)
        free = (c for c in range(0xF0000, 0x10FFFE) if chr(c) not in taken)  # private use
        hide = dict(zip(self._control_characters, free, strict=False))
        if len(hide) < len(self._control_characters):
            raise InvalidRequest("messages use up the private characters of Unicode")
        hidden = [
            {key: text if key == "role" else text.translate(hide) for key, text in message.items()} for message in real
        ]
        rendered, trusted = self._template.render(
            [real, hidden],
            add_generation_prompt=add_generation_prompt,
            bos_token="" if self.bos_id is None else self._pieces[self.bos_id],
            eos_token=self._pieces[self.eos_ids[0]] if self.eos_ids else "",
            tools=None,
            documents=None,
        )
        ids = self.encode(rendered, parse_special=True, add_bos=False)
        found = self._finder.encode(trusted)
        named = any(self._finder.encode(text).ids for text in texts)
        if not named and [at for at in ids if self._kinds[at] == CONTROL] == found.ids:
            return ids
        show = {stand_in: character for character, stand_in in hide.items()}
        ids, done = [], 0
        for control, (start, end) in zip(found.ids, found.offsets, strict=True):
            ids += [*self.encode(trusted[done:start].translate(show), add_bos=False), control]
            done = end
        return ids + self.encode(trusted[done:].translate(show), add_bos=False)

    @cached_property
    def _finder(self) -> Engine:
        """Sees the control tokens in a text and nothing else."""
        added = [added_token(piece, at, special=True) for piece, at in self._controls.items()]
        return _engine({}, _merger({"vocab": self._controls, "merges": []}), added)

    @cached_property
    def _control_characters(self) -> list[int]:
        # white space stays, for templates that trim
        return sorted({ord(c) for piece in self._controls for c in piece if not c.isspace()})

    @cached_property
    def _bytes(self) -> list[bytes]:
        rows = zip(self._pieces, self._kinds, strict=True)
        return [piece_bytes(piece, kind, self._byte_level) for piece, kind in rows]

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for at, meaning in enumerate(self._meanings()):
            if meaning is not None:
                digest.update(struct.pack("<IIB", at, len(meaning[1]), meaning[0]) + meaning[1])
        return digest.hexdigest()

    def _meanings(self) -> Iterable[tuple[bool, bytes] | None]:
        rows = zip(self._kinds, self._bytes, strict=True)
        return (None if kind == UNUSED else (kind == CONTROL, piece) for kind, piece in rows)

    def _checked_id(self, token_id: int) -> int:
        try:
            at = operator.index(token_id)
        except TypeError as error:
            raise InvalidRequest(f"token id {token_id!r} is no integer") from error
        if not 0 <= at < self.vocab_size:
            raise InvalidRequest(f"token id {at} is not in 0..{self.vocab_size - 1}")
        return at


def _merger(model: Spec) -> BPE:
    from tokenizers.models import BPE

    options = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
    given = {key: model[key] for key in options if model.get(key) is not None}
    return BPE(model["vocab"], model["merges"], **given)


def _engine(spec: Spec, merger: BPE, added: Iterable[Spec]) -> Engine:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Engine

    # vocabulary and merges go past JSON, in a third of the time, and serve several engines
    parts = {part: spec.get(part) for part in ("normalizer", "pre_tokenizer", "post_processor")}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    parts |= {"version": "1.0", "added_tokens": [], "model": model}
    engine = Engine.from_str(json.dumps(parts))
    engine.model = merger
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    engine.add_tokens([AddedToken(token["content"], **{flag: token[flag] for flag in flags}) for token in added])
    return engine


class DecodeStream:
    """Text of ids as they come: push() returns characters that are complete, flush() the rest."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strip_space: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._strip_space = strip_space  # until the first character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> DecodeStream:
        """One that goes on from here by itself."""
        twin = copy(self)
        twin._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin

    def push(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._stripped(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


def _checked_messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages must be a list of at least one, got {messages!r:.80}")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{at}] must be a mapping, got {message!r:.80}")
        for key, value in {"role": None, "content": None, **message}.items():
            if not isinstance(key, str) or not key.isidentifier():
                raise InvalidRequest(f"messages[{at}] has a field named {key!r:.80}")
            if not isinstance(value, str):
                raise InvalidRequest(f"messages[{at}].{key} must be a string, got {value!r:.80}")
            if re.search("[\ud800-\udfff]", value):
                raise InvalidRequest(f"messages[{at}].{key} holds a lone surrogate")
        if (role := message["role"]) not in ROLES:
            raise InvalidRequest(f"messages[{at}].role is {role!r:.80}, not one of {ROLES}")
    return [dict(message) for message in messages]
