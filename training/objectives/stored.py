"""Log-probabilities of a corpus under a model, in a folder that training.logprobs makes.

logprobs.f32 has float32 for each token of the documents, in their order, 0 for what is no target.
With --top_k the ids of the likeliest words and their log-probabilities follow each number, in
float32, too. logprobs.json says of which model and which documents they are: a run with others is
refused.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.config import ModelConfig
from kernels.parts import MixerKind
from training.checkpoint.manifest import fingerprint
from training.data.tokens import TokenStore
from training.families.lora import ADAPTER_WEIGHTS, has_adapters, read_adapters
from training.host.errors import UserError, program
from training.host.files import make_folder, read_file, read_json, replace_file, write_file
from training.memory.kinds import describe
from training.objectives.rollout_rows import LARGEST_ID, LEAST_LOGPROB, MOST_LOGPROB

TEACHER = "teacher"  # beginning of the columns of the likeliest words
INDEX, VALUES, FORMAT = "logprobs.json", "logprobs.f32", "fathom logprobs 3"
OLDER_FORMAT = "fathom logprobs 2"  # the digest of its attention is of names that have changed


def digest_of(folder: str | Path) -> str:
    """Returns a digest of a folder's weights: headers, two rows of each tensor, all adapters."""
    if not has_adapters(folder):
        return f"{fingerprint(Path(folder)):08x}"
    _, base = read_adapters(folder)
    return f"{fingerprint(base):08x}+{zlib.crc32(Path(folder, ADAPTER_WEIGHTS).read_bytes()):08x}"


def attention_in_words(model: ModelConfig, kinds: Sequence[MixerKind]) -> str:
    """Returns how a model attends, with a digest of all beside weights that changes its output."""
    exact = *kinds, replace(model, max_position_embeddings=1)
    scaling = "" if model.rope_scaling is None else f", {model.rope_scaling}"
    return f"{describe(kinds)}{scaling} ({zlib.crc32(repr(exact).encode()):08x})"


def without_digest(attention: str) -> str:
    return attention.rpartition(" (")[0]


@dataclass(frozen=True)
class Stored:
    """Log-probabilities, and what they belong to."""

    folder: Path
    weights: str  # digest_of their model's
    attention: str  # attention_in_words their model, of OLDER_FORMAT without the digest
    tokenizer: str  # its identity
    documents: list[int]  # text_identity of the stores: tokens and masks
    tokens: int
    crc32: int
    top_k: int = 0  # likeliest words of each target

    @classmethod
    def read(cls, folder: str | Path) -> "Stored":
        """Reads what a folder says of itself. Raises UserError for a damaged or other one."""
        file = Path(folder, INDEX)
        if not file.is_file():
            raise UserError(
                f"{folder} has no {INDEX}: make it by `{program()} -m training.logprobs`"
            )
        index = read_json(file)
        try:
            written = index.pop("format")
            if written not in (FORMAT, OLDER_FORMAT):
                raise TypeError
            stored = cls(Path(folder), **index)
            if [*map(type, vars(stored).values())][1:] != [str, str, str, list, int, int, int]:
                raise TypeError
            if written == OLDER_FORMAT:
                stored = replace(stored, attention=without_digest(stored.attention))
            return stored
        except (TypeError, KeyError):
            raise UserError(
                f"{file} is damaged, or of another version; make the folder anew"
            ) from None

    @property
    def word_bytes(self) -> int:
        """Bytes of a teacher's words per token of a step.

        They are columns, the same as one tensor, and ids as int64.
        """
        return 16 + (8 + 8 + 8 + 4) * self.top_k

    def check(self, tokenizer: str, start: str | Path | None, attention: str | None) -> None:
        """Refuses another model's or tokenizer's numbers.

        With `start` None any weights are taken, with `attention` None any attention.
        """
        anew = f"make it anew by `{program()} -m training.logprobs`"
        if self.tokenizer != tokenizer:
            raise UserError(
                f"{self.folder} was made with tokenizer {self.tokenizer[:12]}, this run's is "
                f"{tokenizer[:12]}; {anew}"
            )
        if attention and self.attention not in (attention, without_digest(attention)):
            raise UserError(
                f"{self.folder} was made with attention {self.attention}, "
                f"this run has {attention}; "
                f"{anew} with this run's --attention_type, its settings and --rope_scaling"
            )
        digest = self.weights if start is None else digest_of(start)
        if digest != self.weights:
            raise UserError(
                f"{self.folder} is of weights {self.weights}, and {start} has {digest}; {anew}"
            )

    def give(
        self, stores: Sequence[TokenStore], column: str, context_length: int, vocab_size: int
    ) -> None:
        """Gives documents log-probabilities as a column, or a teacher's words as columns.

        Raises UserError for numbers of other documents, and a file that is damaged, has words that
        the model lacks, or was made with a shorter context_length.
        """
        if self.documents != [store.text_identity for store in stores]:
            raise UserError(
                f"{self.folder} is of other documents, or of the same by another chat template or "
                "objective: it needs the same --data, --validation_data and --context_length, with "
                f"their settings; make it anew by `{program()} -m training.logprobs`"
            )
        values = self._read_values()
        names = {column: 0}
        if column == TEACHER:
            names = {f"{TEACHER} {i}": i for i in range(1, values.shape[1])}
        self._check_numbers(values, vocab_size if column == TEACHER else None)
        for store in stores:
            part, values = np.split(values, [int(store.lengths.sum())])
            self._check_documents(part[:, 0], store.lengths, context_length)
            for name, place in names.items():
                store.add_column(name, np.ascontiguousarray(part[:, place]))

    def _read_values(self) -> np.ndarray:
        """Returns float32 [tokens, 1 + 2 top_k]."""
        width = 1 + 2 * self.top_k
        content = read_file(self.folder / VALUES, "make the folder anew")
        if len(content) != 4 * self.tokens * width or zlib.crc32(content) != self.crc32:
            raise UserError(
                f"{self.folder / VALUES} is damaged: its size or CRC-32 is another; "
                "make the folder anew"
            )
        return np.frombuffer(content, "<f4").astype(np.float32).reshape(-1, width)

    def _check_documents(self, values: np.ndarray, lengths: np.ndarray, context_length: int):
        """Refuses documents that have NaN in part, or throughout although they fit."""
        starts = np.cumsum(lengths) - lengths
        is_nan = np.isnan(values[starts])
        if (is_nan != np.logical_or.reduceat(np.isnan(values), starts)).any():
            raise UserError(
                f"{self.folder / VALUES} has NaN in the midst of a document: make the folder anew"
            )
        lacks = is_nan & (lengths <= context_length)  # longer ones are left out, or refused
        if lacks.any():
            raise UserError(
                f"{self.folder} was made with a --context_length into which {lacks.sum():,} "
                f"documents did not fit, the longest of {lengths[lacks].max():,} tokens; "
                f"make it anew with --context_length {context_length}"
            )

    def _check_numbers(self, values: np.ndarray, vocab_size: int | None) -> None:
        """Refuses numbers that are no log-probabilities or ids of words.

        A document that did not fit has NaN throughout. `values` are [tokens, width]; `vocab_size`
        is None if the words are not read.
        """
        known = values[~np.isnan(values).all(1)]
        ids = known[:, 1 : 1 + self.top_k]
        logprobs = np.delete(known, slice(1, 1 + self.top_k), 1)
        wrong = logprobs[~((logprobs >= LEAST_LOGPROB) & (logprobs <= MOST_LOGPROB))]
        if len(wrong):
            raise UserError(
                f"{self.folder / VALUES} has {wrong[0]:g} in the place of a log-probability, "
                f"{LEAST_LOGPROB:g} to 0: make the folder anew"
            )
        if vocab_size is None or not ids.size:
            return
        wrong = ids[~((ids >= 0) & (ids == np.floor(ids)) & (ids < LARGEST_ID))]
        if len(wrong):
            raise UserError(
                f"{self.folder / VALUES} has {wrong[0]:g} in the place of an id: "
                "make the folder anew"
            )
        largest = int(ids.max())
        if largest >= vocab_size:
            raise UserError(
                f"{self.folder} has words of ids up to {largest:,}, the model has a vocab_size of "
                f"{vocab_size:,}; make it with a smaller --top_k, or train a model of the "
                "teacher's vocab_size"
            )


def teacher_of(columns_BT: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Returns ids, int64, and log-probabilities of a teacher's words, [B, T, k] both.

    Returns None if a micro-batch's columns have none.
    """
    count = sum(name.startswith(TEACHER) for name in columns_BT)
    if not count:
        return None
    values = torch.stack([columns_BT[f"{TEACHER} {i}"] for i in range(1, count + 1)], -1)
    return values[..., : count // 2].long(), values[..., count // 2 :]


def store(
    folder: Path,
    values: np.ndarray,
    weights: str,
    attention: str,
    tokenizer: str,
    documents: list[int],
) -> None:
    """Writes a folder that Stored reads; logprobs.json last."""
    content = values.astype("<f4").tobytes()
    top_k = values.shape[1] // 2 if values.ndim == 2 else 0
    index = {
        "format": FORMAT,
        "weights": weights,
        "attention": attention,
        "tokenizer": tokenizer,
        "documents": documents,
        "tokens": len(values),
        "crc32": zlib.crc32(content),
        "top_k": top_k,
    }
    make_folder(folder)
    (folder / INDEX).unlink(missing_ok=True)
    write_file(folder / VALUES, content)
    replace_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
