"""The tokenized corpus: how long each document is, and any part of any document."""

import functools
import zlib

import numpy as np

from training.data.sources import Document


class TokenStore:
    """Documents by their number, each with the end-of-text id as its last token. All tokens are in memory.

    Args:
        documents: of load_documents or split_documents.
        eos_id: the tokenizer's end-of-text id.

    Attributes:
        eos_id: as given.
        lengths: int64 [N], tokens of each document, its end included.
        num_masked: int64 [N], leading tokens of each document that are no targets.
    """

    def __init__(self, documents: list[Document], eos_id: int):
        self.eos_id, self._documents = eos_id, documents
        self.lengths = np.array([len(document.tokens) + 1 for document in documents], dtype=np.int64)
        self.num_masked = np.array([document.num_masked for document in documents], dtype=np.int64)

    @functools.cached_property
    def identity(self) -> int:
        """CRC-32 of all lengths, masks and tokens. The first call reads the whole corpus."""
        crc = 0
        for document in self._documents:
            crc = zlib.crc32(f"{len(document.tokens)},{document.num_masked};".encode(), crc)
            crc = zlib.crc32(np.ascontiguousarray(document.tokens).data, crc)
        return crc

    def source(self, document: int) -> str:
        """The file that a document comes from, of a .jsonl file with the line's number."""
        return self._documents[document].source

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start], the ids at positions start .. stop - 1 of a document; 0 <= start <= stop <= its length.

        Of a document of tokens 5 6 7, read(document, 1, 4) is 6 7 and the end-of-text id.
        """
        ids = np.full(stop - start, self.eos_id, dtype=np.int64)
        tokens = self._documents[document].tokens[start:stop]
        ids[: len(tokens)] = tokens
        return ids
