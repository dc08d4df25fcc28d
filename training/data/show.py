"""A batch as text, for --show_batch: the tokens that a model is trained on. show_html.py makes a page of it."""

from dataclasses import dataclass
from itertools import groupby

from model import IGNORE_INDEX
from training.data.loader import PackedLoader, longest_first, make_batch

NEAR = 8  # tokens before a stretch that it is decoded with
SHOWN = 400  # characters of one stretch of targets, or of masked tokens
GREEN, END = "\033[32m", "\033[0m"


@dataclass
class Stretch:
    """Neighbouring tokens of a document, all targets or none, as text."""

    text: str
    is_target: bool


@dataclass
class ShownDocument:
    title: str  # its source and its numbers of tokens
    num_tokens: int
    num_targets: int
    stretches: list[Stretch]


@dataclass
class ShownSequence:
    title: str
    length: int  # tokens, padding included
    documents: list[ShownDocument]


def show_batch(loader: PackedLoader, tokenizer, color: bool = False) -> str:
    """Returns the documents in the next `batch_size` sequences of the loader's global order, as text.

    Targets stand between [[ and ]], in green if `color` is set.
    """
    lines = list[str]()
    before, after = (f"{GREEN}[[", f"]]{END}") if color else ("[[", "]]")
    for sequence in read_batch(loader, tokenizer, SHOWN):
        lines.append(sequence.title)
        for document in sequence.documents:
            texts = (f"{before}{one.text}{after}" if one.is_target else one.text for one in document.stretches)
            lines += [f"--- {document.title}", "".join(texts)]
    return "\n".join(lines)


def read_batch(loader: PackedLoader, tokenizer, most: int) -> list[ShownSequence]:
    """Returns the next `batch_size` sequences of the loader's global order; of a stretch `most` characters at most."""
    first, length, sequences = loader.next_sequence, loader.packing.context_length, list[ShownSequence]()
    for index in range(first, first + loader.batch_size):
        spans = loader.spans(index)
        batch = make_batch(loader.store, [spans], length)
        is_target = [False, *(batch.targets[0, :-1] != IGNORE_INDEX).tolist()]
        used = sum(stop - start for _, start, stop in spans)
        title = (
            f"sequence {index}: {len(spans)} documents, {sum(is_target):,} of {length:,} tokens are trained on, "
            f"{length - used:,} are padding"
        )
        sequences.append(ShownSequence(title, length, []))
        position = 0
        for document, start, stop in longest_first(spans):
            places = range(position, position + stop - start)
            source, count = loader.store.source(document), sum(is_target[i] for i in places)
            title = f"{source}, tokens {start:,} to {stop - 1:,}, {count:,} of them trained on"
            shown = ShownDocument(title, stop - start, count, [])
            before = list[int]()
            for kind, group in groupby(places, is_target.__getitem__):
                ids = batch.input_ids[0, [*group]].tolist()
                shown.stretches.append(Stretch(_shown(ids, before, tokenizer, most), kind))
                before = ids[-NEAR:]
            sequences[-1].documents.append(shown)
            position = places.stop
    return sequences


def _shown(ids: list[int], before: list[int], tokenizer, most: int) -> str:
    """Returns the text of ids that follow those `before`: alone they may lose the space that they begin with."""
    earlier = tokenizer.decode(before, with_special=True)
    text = tokenizer.decode(before + ids, with_special=True)
    text = text[len(earlier) :] if text.startswith(earlier) else tokenizer.decode(ids, with_special=True)
    if len(text) > most:
        text = f"{text[: most // 2]} ...{len(text) - most:,} characters... {text[-most // 2 :]}"
    return text
