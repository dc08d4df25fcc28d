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
# Places where a part may begin: a line, space before a word, Chinese punctuation behind a word.
PART_START = re.compile(
    r"(?<=\n)[!-~]|(?<=[^\W_]) (?=[^\W\d_])|(?<=[^\W_])[\u3001\u3002\uff01\uff0c\uff1f]"
)
NEAR = 50  # characters on each side of such a place that are tokenized together and apart
# Tokens that end documents, where a folder names no eos_token: the first in its vocabulary.
END_OF_TEXT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255. Id 0 ends a document: sources.py refuses NUL in texts."""

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
        # A wider model has ids past the bytes. They are shown as 0xFF, which UTF-8 never has.
        return bytes(min(int(i), 0xFF) for i in ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """Hugging Face's tokenizer of a tokenizer.json with the files beside it, or of its folder.

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
            # A file may set truncation and padding for inference. Truncation would cut documents.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            ordinary = self._tokenizer.get_vocab(with_added_tokens=False)
            probe = self._tokenizer.encode("a", add_special_tokens=True)
        # Its file and source; None: the folder's.
        self.chat_template: tuple[Path, str] | None = None
        self.added_for_chats: list[str] = []  # tokens that no file of the folder has
        content = self._tokenizer.to_str().encode() if is_changed else content
        self.identity = hashlib.sha256(content).hexdigest()
        # Ids may have holes: sizes are not their number.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.ordinary_size = max(ordinary.values(), default=-1) + 1  # without added tokens
        self.eos_id = self._find_end(vocabulary)
        self.eos_token = self._tokenizer.id_to_token(self.eos_id)
        self._before = np.array(self._find_before(probe), dtype=np.uint32)

    def _find_before(self, probe) -> list[int]:
        """Returns ids that the file puts before every text: special ones before a word's ids.

        Where the word has no id, they end at the token that ends documents.
        """
        begins_so = self.eos_token == self.special_tokens.get("bos_token")
        has_word = not all(probe.special_tokens_mask)
        ids = []
        for token, is_special in zip(probe.ids, probe.special_tokens_mask):
            is_end = token == self.eos_id and not has_word and not begins_so
            if is_end or not is_special:
                break
            ids.append(token)
        return ids

    def _find_end(self, vocabulary: dict[str, int]) -> int:
        """Returns the id that ends documents."""
        end = vocabulary.get(self.special_tokens.get("eos_token", ""))
        if end is None:
            end = first_stop_id(self.folder, self._tokenizer.get_added_tokens_decoder())
        if end is not None:
            return end
        for token in END_OF_TEXT_TOKENS:
            if token in vocabulary:
                return vocabulary[token]
        raise UserError(
            f"tokenizer {self.name} has no token to end documents: name its eos_token in a "
            "tokenizer_config.json beside it, or add one of " + ", ".join(END_OF_TEXT_TOKENS)
        )

    def give_chats(self, file: Path, template: str, tokens: list[str]) -> None:
        """Takes a chat template in place of the folder's, and adds its special tokens."""
        self.chat_template = file, template
        self.added_for_chats = [token for token in tokens if token not in self.added_tokens]
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
        if self.added_for_chats:
            files["tokenizer.json"] = self._tokenizer.to_str().encode()
        return files

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([self._encode(part) for part in self._cut(text)])

    def encode_from_start(self, text: str) -> np.ndarray:
        """Returns the ids of a text, behind ids such as Llama's <|begin_of_text|>.

        The file puts these before every text. A text that begins with them has them already.
        """
        return self._begun(self.encode(text))

    def encode_sample(self, prompt: str, completion: str) -> tuple[np.ndarray, int]:
        """Returns ids of prompt and completion as one text, and how many are the prompt's.

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
        """Returns ids, uint32 [N], and each id's characters start .. stop - 1, int64 [N, 2]."""
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
        """Lets offsets include spaces, which a post-processor may trim."""
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
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in tokens)

    def _encode(self, text: str) -> np.ndarray:
        with self._refusing(f"encode {text[:40]!r}"):
            # The fast call does not say where each token stands in the text.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def _cut(self, text: str) -> Iterator[str]:
        """Cuts a text into parts of about PART characters.

        The library takes 200 bytes per token of a part. The parts have the tokens of the whole
        text. A text without a place to cut it stays whole.
        """
        start: int | None = 0
        while start is not None:
            matches = itertools.islice(PART_START.finditer(text, start + PART), 1000)
            places = (match.start() for match in matches)
            stop = next((place for place in places if self._is_border(text, place)), None)
            yield text[start:stop]
            start = stop

    def _is_border(self, text: str, place: int) -> bool:
        """Whether the text near a place has the same tokens when it is cut there."""
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
    """Opens a run's tokenizer: a tokenizer.json or its folder; "bytes" or None for bytes.

    Its identity is "bytes", or the SHA-256 of the file with its folder's tokens; ids are uint8 or
    uint32.
    """
    return ByteTokenizer() if path in (None, "bytes") else FileTokenizer(Path(path))


def check_ids(largest: int, tokenizer, vocab_size: int, where: str) -> None:
    """Raises UserError if `largest` of the ids at `where` is not below a model's vocab_size.

    The end-of-text id must be below it, too.
    """
    largest = max(largest, tokenizer.eos_id)
    if largest >= vocab_size:
        raise UserError(
            f"{where}: token id {largest} is not below the model's vocab_size {vocab_size}; "
            f"tokenizer {tokenizer.name} needs a model of vocab_size {tokenizer.vocab_size} or more"
        )
