"""Tokenizers: UTF-8 bytes, for which no file is needed, and Hugging Face's tokenizer.json."""

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from training.data.special_tokens import add_special_tokens, first_stop_id
from training.host.errors import UserError, import_optional
from training.host.files import JSON_BYTES, read_file

PART = 2**19  # characters given to the library at a time
# Places where a part may begin: a line, the space before a word, or Chinese punctuation behind a
# word.
PART_START = re.compile(
    r"(?<=\n)[!-~]|(?<=[^\W_]) (?=[^\W\d_])|(?<=[^\W_])[\u3001\u3002\uff01\uff0c\uff1f]"
)
NEAR = 50  # characters on each side of such a place that are tokenized together and apart
# Tokens that end documents. A folder that names no eos_token has the first of them in its
# vocabulary.
END_OF_TEXT_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>",
    "<|im_end|>",
)  # fmt: skip


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255. Id 0 ends a document; it is free for that because sources.py
    refuses NUL."""

    name = identity = "bytes"
    vocab_size = ordinary_size = 256
    eos_id, eos_token = 0, "\0"
    has_template_flag = False

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    encode_from_start = encode

    def encode_sample(self, prompt: str, completion: str) -> tuple[np.ndarray, int]:
        return self.encode(prompt + completion), len(self.encode(prompt))

    def decode(self, ids, with_special: bool = False) -> str:
        # A wider model has ids past the bytes. They are shown as 0xFF, which UTF-8 never has: a
        # replacement character.
        return bytes(min(int(i), 0xFF) for i in ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """Hugging Face's tokenizer of a tokenizer.json, or of a folder that has one, with the files
    beside it.

    Special tokens that are written out in a text become their ids. The token that ends documents is
    the folder's eos_token; without one the first eos_token_id of its model, or the first of
    END_OF_TEXT_TOKENS.
    """

    has_template_flag = True  # whether the command has --chat_template, for what errors say

    def __init__(self, path: Path):
        path = path / "tokenizer.json" if path.is_dir() else path
        library = import_optional("tokenizers", f"--tokenizer {path}")
        content = read_file(path, "give --tokenizer the path of a tokenizer.json", JSON_BYTES)
        self.name, self.folder = str(path), path.parent
        with self._refusing("be read"):
            self._tokenizer = library.Tokenizer.from_buffer(content)
            self.special_tokens, is_changed = add_special_tokens(self._tokenizer, self.folder)
            # A file may set truncation and padding for inference. Truncation would cut documents
            # without a word.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            ordinary = self._tokenizer.get_vocab(with_added_tokens=False)
            probe = self._tokenizer.encode("a", add_special_tokens=True)
        self.chat_template: tuple[Path, str] | None = (
            None  # its file and source; None: the folder's
        )
        self.added_for_chats: list[str] = []  # tokens that no file of the folder has
        content = self._tokenizer.to_str().encode() if is_changed else content
        self.identity = hashlib.sha256(content).hexdigest()
        self.vocab_size = (
            max(vocabulary.values(), default=-1) + 1
        )  # ids may have holes: not their number
        self.ordinary_size = max(ordinary.values(), default=-1) + 1  # without added tokens
        self.eos_id = self._find_end(vocabulary)
        self.eos_token = self._tokenizer.id_to_token(self.eos_id)
        # Ids that the file puts before every text: the special tokens before the word, if it has a
        # token.
        is_begun = not all(probe.special_tokens_mask) or self.eos_token == self.special_tokens.get(
            "bos_token"
        )
        end = None if is_begun else self.eos_id
        added = itertools.takewhile(
            lambda each: each[1] and each[0] != end, zip(probe.ids, probe.special_tokens_mask)
        )
        self._before = np.array([i for i, _ in added], dtype=np.uint32)

    def _find_end(self, vocabulary: dict[str, int]) -> int:
        found = vocabulary.get(self.special_tokens.get("eos_token", ""))
        if found is None:
            found = first_stop_id(self.folder, self._tokenizer.get_added_tokens_decoder())
        if found is None:
            found = next(
                (vocabulary[token] for token in END_OF_TEXT_TOKENS if token in vocabulary), None
            )
        if found is None:
            cure = "name its eos_token in a tokenizer_config.json beside it"
            usual = ", ".join(END_OF_TEXT_TOKENS)
            raise UserError(
                f"tokenizer {self.name} has no token to end documents: {cure}, or add one of "
                f"{usual}"
            )
        return found

    def give_chats(self, file: Path, template: str, tokens: list[str]) -> None:
        """Take a chat template in place of the folder's, and add its special tokens where they are
        missing."""
        self.chat_template, self.added_for_chats = (
            (file, template),
            [t for t in tokens if t not in self.added_tokens],
        )
        if self.added_for_chats:
            self._tokenizer.add_special_tokens(self.added_for_chats)
            del self.added_tokens
            self.identity = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def changed_files(self) -> dict[str, bytes]:
        """Returns the files of the folder that are to be saved otherwise, by their names."""
        if self.chat_template is None:
            return {}
        files = {"chat_template.jinja": self.chat_template[1].encode()}
        return files | (
            {"tokenizer.json": self._tokenizer.to_str().encode()} if self.added_for_chats else {}
        )

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([self._encode(part) for part in self._cut(text)])

    def encode_from_start(self, text: str) -> np.ndarray:
        """Returns the ids of a text behind those that the file puts before every text, as Llama's
        <|begin_of_text|>.

        A text that begins with them has them already.
        """
        return self._begun(self.encode(text))

    def encode_sample(self, prompt: str, completion: str) -> tuple[np.ndarray, int]:
        """Returns (ids of prompt and completion as one text, from its start; how many are the
        prompt's).

        A token with characters of both is the completion's: no other token has its first
        characters.
        """
        ids, offsets = self.encode_with_offsets(prompt + completion)
        is_prompt = (offsets[:, 0] < len(prompt)) & (offsets[:, 1] <= len(prompt))
        begun = self._begun(ids)
        return begun, len(begun) - len(ids) + int(np.logical_and.accumulate(is_prompt).sum())

    def _begun(self, ids: np.ndarray) -> np.ndarray:
        has_begun = np.array_equal(ids[:1], self._before[:1])
        return ids if has_begun else np.concatenate([self._before, ids])

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, the characters start .. stop - 1 of each id), uint32 [N] and int64 [N,
        2]."""
        ids, offsets, position = [], [], 0
        for part in self._cut(text):
            with self._refusing(f"encode {part[:40]!r}"), self._untrimmed():
                encoding = self._tokenizer.encode(part, add_special_tokens=False)
            ids.append(np.array(encoding.ids, dtype=np.uint32))
            offsets.append(position + np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
            position += len(part)
        return np.concatenate(ids), np.concatenate(offsets)

    @contextmanager
    def _untrimmed(self) -> Iterator[None]:
        """Have offsets include spaces. A post-processor may trim them: a token of spaces would
        begin where it ends."""
        processor = self._tokenizer.post_processor
        self._tokenizer.post_processor = None
        try:
            yield
        finally:
            self._tokenizer.post_processor = processor

    @property
    def beginning(self) -> str:
        return self.decode(self._before, with_special=True)

    @functools.cached_property
    def added_tokens(self) -> frozenset[str]:
        """Strings that are one token wherever a text has them, such as <|im_start|>."""
        return frozenset(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values()
        )

    def _encode(self, text: str) -> np.ndarray:
        with self._refusing(f"encode {text[:40]!r}"):
            # The fast call does not say where each token stands in the text.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def _cut(self, text: str) -> Iterator[str]:
        """Cuts a text into parts of about PART characters: the library takes 200 bytes per token of
        a part.

        The parts have the tokens of the whole text. A text without a place to cut it stays whole.
        """
        start: int | None = 0
        while start is not None:
            matches = itertools.islice(PART_START.finditer(text, start + PART), 1000)
            stop = next(
                (match.start() for match in matches if self._is_border(text, match.start())), None
            )
            yield text[start:stop]
            start = stop

    def _is_border(self, text: str, place: int) -> bool:
        """Whether the text near a place has the same tokens when it is cut there: true where words
        are split."""
        before, behind = text[place - NEAR : place], text[place : place + NEAR]
        apart = [*self._encode(before), *self._encode(behind)]
        return self._encode(before + behind).tolist() == apart

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The library raises bare Exception, or a panic of Rust's, which is not an Exception.
            is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
            if isinstance(error, UserError) or not is_of_library:
                raise
            raise UserError(
                f"tokenizer {self.name} cannot {what}: {error}; give another tokenizer.json"
            ) from None

    def decode(self, ids, with_special: bool = False) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not with_special)


def load_tokenizer(path: str | None) -> ByteTokenizer | FileTokenizer:
    """Opens a run's tokenizer: a tokenizer.json, or the folder that has it; "bytes" or None for
    bytes.

    Its identity is "bytes", or the SHA-256 of the file with its folder's tokens; ids are uint8 or
    uint32.
    """
    return ByteTokenizer() if path in (None, "bytes") else FileTokenizer(Path(path))


def check_ids(largest: int, tokenizer, vocab_size: int, where: str) -> None:
    """Raise UserError if `largest`, of the ids at `where`, or the end-of-text id is not below a
    model's vocab_size."""
    largest = max(largest, tokenizer.eos_id)
    if largest >= vocab_size:
        needs = (
            f"tokenizer {tokenizer.name} needs a model of vocab_size {tokenizer.vocab_size} or more"
        )
        raise UserError(
            f"{where}: token id {largest} is not below the model's vocab_size {vocab_size}; {needs}"
        )
