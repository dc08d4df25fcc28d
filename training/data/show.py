"""A batch as text, so that one sees what a model is trained on: --show_batch."""

from itertools import groupby

from model import IGNORE_INDEX
from training.data.loader import PackedLoader, longest_first, make_batch

SHOWN = 400  # characters of a stretch of trained, or of masked, text
GREEN, END = "\033[32m", "\033[0m"


def show_batch(loader: PackedLoader, tokenizer, color: bool = False) -> str:
    """The documents of the loader's next sequences, a micro-batch of them in the global order.

    The tokens that are to be predicted stand between [[ and ]], in green where `color` is set.
    """
    first, length, lines = loader.next_sequence, loader.packing.context_length, []
    for index in range(first, first + loader.batch_size):
        pieces = loader.pieces(index)
        batch = make_batch(loader.store, [pieces], length)
        is_target = [False, *(batch.targets[0, :-1] != IGNORE_INDEX).tolist()]
        used = sum(stop - start for _, start, stop in pieces)
        lines.append(
            f"sequence {index}: {len(pieces)} documents, {sum(is_target):,} of {length:,} tokens are trained on, "
            f"{length - used:,} are padding"
        )
        position = 0
        for document, start, stop in longest_first(pieces):
            places = range(position, position + stop - start)
            count = sum(is_target[i] for i in places)
            source = loader.store.source(document)
            lines.append(f"--- {source}, tokens {start:,} to {stop - 1:,}, {count:,} of them trained on")
            spans = [(kind, list(span)) for kind, span in groupby(places, key=is_target.__getitem__)]
            ids = batch.input_ids[0]
            lines.append("".join(_span(ids[span].tolist(), kind, tokenizer, color) for kind, span in spans))
            position += stop - start
    return "\n".join(lines)


def _span(ids: list[int], is_target: bool, tokenizer, color: bool) -> str:
    text = tokenizer.decode(ids, with_special=True)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ...{len(text) - SHOWN:,} characters... {text[-SHOWN // 2 :]}"
    if not is_target:
        return text
    return f"{GREEN}[[{text}]]{END}" if color else f"[[{text}]]"
