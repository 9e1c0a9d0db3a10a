"""Tokenizers: bytes, a tokenizer.json, or one of a hub. The only module that turns text into tokens.

A tokenizer.json is data: rules and a table, read by the `tokenizers` library, which executes none of it. Words of a
text that look like a special token are encoded as words, so no document can end itself. Its author is unknown: what its
rules may make of a character is counted, and the library gets no more at once than memory has room for.

Knows nothing of text files.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from noloco_node.base.validation import in_one_line
from noloco_node.data import sources
from noloco_node.errors import NolocoError, UsageError

Text: TypeAlias = str | bytes
"""Bytes are UTF-8, perhaps with errors."""
Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
"""Names of the token between two documents, as models use them; a tokenizer.json does not say which it is."""
MAX_VOCABULARY = 1 << 24
MOST_GROWTH = 1 << 16
"""Characters that the rules may make of one. ALBERT's, which has the most among those in use, may make 4,000, by the
longest that each of its rules can do."""
MOST_MADE = 2 << 20
"""Characters that the rules may make at once. Each takes up to 350 bytes where it is a token, together 0.7 GB; of bytes
as GPT-2 has them, it is 512 Ki of text."""
MOST_DECODED = 64 << 20
"""Characters that tokens may be decoded to at once, with some bytes each: a million tokens have less."""
MOST_TOKENS = 16
"""For each character of a text. Bytes take 4."""


class Bytes:
    """Each byte is a token. Zero, which no text has, ends a document."""

    vocabulary = 256
    """Every token is below it."""
    end = 0
    """The token after each document."""
    digest = hashlib.sha256(b"noloco bytes").digest()
    """32 bytes, the same for the same tokens."""

    def encode(self, texts: Sequence[Text]) -> list[Tokens]:
        return [np.frombuffer(t.encode() if isinstance(t, str) else t, np.uint8) for t in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def file(self) -> None:
        """The tokenizer.json, where it is one."""


BYTES = Bytes()


class FileTokenizer:
    """Described by a tokenizer.json. Raises UsageError where `content` is none, or has no end token."""

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer as Library

        self._content = content
        with _errors("is not a tokenizer.json that can be read"):
            self._library = Library.from_str(content.decode())
        self._library.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()
        known = self._library.get_vocab(with_added_tokens=True)
        self.vocabulary = max(known.values(), default=-1) + 1
        self.end = _end(known)
        self.digest = hashlib.sha256(content).digest()
        model = self._library.model
        if getattr(model, "dropout", None):  # some merges left out by chance: each node would have other tokens
            model.dropout = None
        self._growth = _growth(self._library.normalizer) * _growth(self._library.pre_tokenizer)
        if any(name.startswith("<0x") for name in known):  # tokens of bytes, for characters that have none
            self._growth *= 4
        self._decoding = _growth(self._library.decoder)
        if max(self._growth, self._decoding) > MOST_GROWTH:
            raise UsageError(f"the tokenizer's rules may make more than {MOST_GROWTH} characters of one: take another")
        if self.vocabulary > MAX_VOCABULARY:
            raise UsageError(f"the tokenizer has {self.vocabulary} tokens, and {MAX_VOCABULARY} are possible")
        self._lengths = np.zeros(self.vocabulary, np.int32)  # of each token, with a space; some have one number
        np.maximum.at(self._lengths, [*known.values()], [len(name) + 1 for name in known])

    def encode(self, texts: Sequence[Text]) -> list[Tokens]:
        words = [t if isinstance(t, str) else t.decode(errors="replace") for t in texts]
        parts: list[list[Tokens]] = [[] for _ in words]
        for batch in _batches(words, max(1, MOST_MADE // self._growth)):
            with _errors("fails on a text"):
                found = self._library.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
            for (index, piece), each in zip(batch, found, strict=True):
                if len(each) > MOST_TOKENS * (len(piece) + MOST_TOKENS):
                    raise UsageError(f"the tokenizer makes {len(each)} tokens of {len(piece)} characters: take another")
                parts[index].append(np.array(each.ids, width(self.vocabulary)))
        return [np.concatenate(each) if len(each) > 1 else each[0] for each in parts]

    def decode(self, tokens: Iterable[int]) -> str:
        tokens = list(tokens)
        if self._lengths[tokens].sum() * self._decoding > MOST_DECODED:
            raise UsageError(f"the tokenizer may make too long a text of {len(tokens)} tokens: take another")
        with _errors("fails on tokens"):
            text: str = self._library.decode(tokens)
        return text

    def file(self) -> bytes:
        return self._content


Tokenizer: TypeAlias = Bytes | FileTokenizer


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Of the library, as one sentence: it raises nothing narrower than Exception, and a BaseException where it panics,
    as for a regex that takes too many tries."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001
        raise UsageError(f"the tokenizer {what}: {in_one_line(error)}") from None


def _batches(texts: Sequence[str], most: int) -> Iterator[list[tuple[int, str]]]:
    """The texts' indices and pieces, at most so many characters at once."""
    batch: list[tuple[int, str]] = []
    size = 0
    for index, text in enumerate(texts):
        for start in range(0, len(text) or 1, most):
            piece = text[start : start + most]
            if size + len(piece) > most:
                yield batch
                batch, size = [], 0
            batch.append((index, piece))
            size += len(piece)
    if batch:
        yield batch


_GROWTH = {
    "BPEDecoder": 2,  # an empty suffix is between all characters; so is CTC's empty delimiter
    "BertNormalizer": 12,  # spaces around it, lower case, its accents apart
    "ByteLevel": 4,
    "CTC": 2,
    "Lowercase": 3,
    "Metaspace": 2,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
}
"""Characters that a rule makes of one, at most, where its settings do not say it; rules that are not here make one."""


def _growth(rules: Any) -> int:
    """Characters that a tokenizer's normalizer, pre-tokenizer or decoder makes of one, at most."""
    return _growth_of(json.loads(rules.__getstate__())) if rules is not None else 1


def _growth_of(rule: dict[str, Any]) -> int:
    match rule["type"]:
        case "Sequence":
            parts = next((value for value in rule.values() if isinstance(value, list)), [])
            return math.prod(map(_growth_of, parts))
        case "Prepend":
            return 1 + len(rule["prepend"])
        case "Replace":
            plain = rule["pattern"].get("String")  # an expression may match between two characters
            return -(-len(rule["content"]) // len(plain)) or 1 if plain else 1 + len(rule["content"])
        case "Precompiled":  # a table of strings behind a trie
            table = base64.b64decode(rule["precompiled_charsmap"])
            strings = table[4 + int.from_bytes(table[:4], "little") :]
            return max((len(each.decode(errors="replace")) for each in strings.split(b"\0")), default=0) or 1
        case "ByteLevel" if rule.get("add_prefix_space"):
            return 2 * _GROWTH["ByteLevel"]
    return _GROWTH.get(rule["type"], 1)


def width(vocabulary: int) -> "np.dtype[np.unsignedinteger[Any]]":
    """The smallest type that holds every token, little-endian."""
    return np.dtype("<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


def packed(texts: Sequence[Text], tokenizer: Tokenizer) -> Tokens:
    """One array, with the tokenizer's end after each text."""
    kind = width(tokenizer.vocabulary)
    end = np.array([tokenizer.end], kind)
    parts = [part for tokens in tokenizer.encode(texts) for part in (tokens, end)]
    return np.concatenate(parts) if parts else np.empty(0, kind)


def load(name: str, path: Path | None) -> Tokenizer:
    """The tokenizer that a manifest names. `path`: the volunteer's file."""
    if name == "bytes":
        return BYTES
    if name.startswith("hub:"):
        return _from_hub(*name.removeprefix("hub:").split("@"))
    content = sources.tokenizer_bytes(name, path)
    if content is None:
        raise UsageError(f"data.tokenizer: there is no {name!r} here. Update noloco-node")
    return FileTokenizer(content)


def _end(known: dict[str, int]) -> int:
    for name in END_TOKENS:
        if name in known:
            return known[name]
    raise UsageError(f"the tokenizer has no token for the end of a text: add one of {', '.join(END_TOKENS)} to it")


def _from_hub(repository: str, commit: str) -> FileTokenizer:
    """Its size is looked at before it is downloaded, and what is refused does not stay on the disk."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    name = "tokenizer.json"
    kept = try_to_load_from_cache(repository, name, revision=commit)
    if isinstance(kept, str):  # else it is not known, or known to be absent
        try:
            return FileTokenizer(sources.read_tokenizer(Path(kept)))
        except UsageError as error:
            file = Path(kept).resolve()
            raise UsageError(f"{error}. If {file} is damaged, delete it: then it is fetched again") from None
    try:
        there = get_hf_file_metadata(hf_hub_url(repository, name, revision=commit))
        sources.check_size(there.size or 0, f"the tokenizer of {repository}")  # without a size it is not downloaded
        found = Path(hf_hub_download(repository, name, revision=commit))
    except UsageError:
        raise
    except Exception as error:
        raise NolocoError(
            f"cannot fetch the tokenizer of {repository} at {commit[:12]} ({type(error).__name__}): is this machine "
            "online, and may it read that repository?"
        ) from error
    try:
        return FileTokenizer(sources.read_tokenizer(found))
    except UsageError:
        for path in (found.resolve(), found):  # what the cache's link points to, and the link
            path.unlink(missing_ok=True)
        raise
