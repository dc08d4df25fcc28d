"""Tokenizers: UTF-8 bytes, which need no file, and Hugging Face's tokenizer.json."""

import hashlib
from pathlib import Path

import numpy as np

from training.errors import UserError, read_file

END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "<|end_of_text|>")


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255. Id 0 ends a document: text holds no NUL byte (load_documents refuses it)."""

    name = identity = "bytes"
    vocab_size = 256
    eos_id = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids) -> str:
        # 0xFF never occurs in UTF-8, so an id past the bytes (a wider model's) also shows as a replacement character.
        return bytes(min(int(i), 0xFF) for i in ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face tokenizer.json. Special tokens written out in the text become their ids."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(f"--tokenizer {path} needs the tokenizers package: pip install tokenizers") from None
        content = read_file(path, "give --tokenizer the path of a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"cannot read tokenizer {path}: {error}; give the path of a tokenizer.json") from None
        # A file may carry truncation and padding for inference; truncation would silently cut documents short.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.identity = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # not the number of ids, which may have holes
        self.eos_id = next((vocabulary[token] for token in END_OF_TEXT_TOKENS if token in vocabulary), None)
        if self.eos_id is None:
            raise UserError(f"tokenizer {path} has none of {', '.join(END_OF_TEXT_TOKENS)}: add one to end documents")

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        except Exception as error:  # as of an unknown word for which the file has no token
            raise UserError(f"tokenizer {self.name} cannot encode {text[:40]!r}: {error}") from None

    def decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids])


def load_tokenizer(path: str | None) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a run.

    Args:
        path: a tokenizer.json; "bytes" or None for bytes.

    Returns:
        An object with name, identity ("bytes", or the file's SHA-256), vocab_size (added tokens included), eos_id,
        encode(str) -> np.ndarray of ids (uint8 or uint32) and decode(ids) -> str.

    Raises:
        UserError: the tokenizers package is absent, the file is missing or invalid, or no end-of-text token is known.
    """
    return ByteTokenizer() if path in (None, "bytes") else FileTokenizer(Path(path))
