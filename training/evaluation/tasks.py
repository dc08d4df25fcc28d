"""Synthetic tasks that need the whole context, in the manner of RULER, arXiv 2404.06654.

| task              | hidden in the prompt                                             | asked                         |
| ---               | ---                                                              | ---                           |
| needle            | one sentence with a number, in repeated filler                   | the number                    |
| multi_key_needle  | such sentences and nothing else, each with another key           | the number of one key         |
| variable_tracking | two chains of five assignments, X = 12345, Y = X, ..., in filler | the five variables of a chain |
| common_words      | a shuffled list, ten of its words ten times as often             | the ten words                 |
| frequent_words    | made-up words; the word of rank r is about 1 / r^2 of the text   | the three most frequent words |

A prompt ends with the start of the answer, as in RULER, so that a model without chat tuning continues it. The score is
the share of the asked words among the words that the model writes. Unlike RULER's, prompts hold no worked example and
no essays, and two chains instead of one: scores are not comparable with RULER's, only with each other. Nothing is
downloaded: every sample is made from a seed.
"""

import random
import re
import string
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # place of a needle in its text: 0 at the start, 1 at the end
CHAIN, COMMON, FREQUENT = 5, 10, 3  # words of an answer
FILLER = (
    "The river runs past the old mill.", "A boat waits at the pier.", "The wind is mild today.",
    "We walk up the hill and rest.", "Someone left the gate open.", "It will rain before the evening.",
)  # fmt: skip
WORDS = """
amber bold brisk calm clear cold coral crisp dark deep dry dusty early faint fair fine fresh grand gray green happy
hollow iron ivory keen late light lone long loud mild neat noble old pale plain proud quick quiet rare red rough round
sharp short shy silver slow small soft solid steep still strong sweet tall thin warm white wide wild young

acorn anchor apple arrow badge barn basin beach bell bench bird bridge brook cabin candle canoe castle cedar chair cliff
cloud coin copper crane creek crown desk door eagle falcon farm feather fence field flame forest fox garden glass goat
grove hammer harbor hawk island jacket kettle ladder lake lamp leaf lemon lion maple meadow mirror moss mountain needle
oak orchard otter owl paddle path pearl pebble pine pond rabbit raven ridge ring river robin rope saddle salmon shell
ship shore spoon spring star stone storm stream table tiger tower trail tree valley violin wagon wall water wheel willow
window wolf wood
"""
ADJECTIVES, NOUNS = (part.split() for part in WORDS.split("\n\n"))
LARGEST_VOCABULARY = 10_000
# Short words first, then pairs of them in no order.
VOCABULARY = [*NOUNS, *random.Random(0).sample([a + b for a in NOUNS for b in NOUNS], LARGEST_VOCABULARY)]


class Sample(NamedTuple):
    """A prompt, the words that it asks for, and the answer that should follow it."""

    prompt: str
    words: tuple[str, ...]
    answer: str


class Task(NamedTuple):
    """A way to make samples."""

    make: Callable[[random.Random, int, float], Sample]  # (random, size: sentences or words of the text, depth)
    least: int  # the smallest size with something to find
    has_depth: bool = False  # whether `depth` says where the needle lies


def _needle_of(key: str, number: int) -> str:
    return f"The magic number of {key} is {number}."


def _ask_needle(text: str, key: str, number: int) -> Sample:
    prompt = (
        f"Remember the magic numbers in this text.\n\n{text}\n\n"
        f"Question: What is the magic number of {key}?\nAnswer: The magic number of {key} is"
    )
    return Sample(prompt, (str(number),), f" {number}")


def _draw_names(draw: random.Random, letters: str, length: int, count: int) -> list[str]:
    """Distinct made-up words, in no order."""
    names: set[str] = set()
    while len(names) < count:
        names.add("".join(draw.choices(letters, k=length)))
    return draw.sample(sorted(names), count)


def _draw_needles(draw: random.Random, count: int) -> list[tuple[str, int]]:
    """Distinct keys and their numbers."""
    ends = range(10, 10 + max(90, 2 * count // (len(ADJECTIVES) * len(NOUNS)) + 1))
    kinds = range(len(ADJECTIVES) * len(NOUNS) * len(ends))
    needles = []
    for kind in draw.sample(kinds, count):
        kind, end = divmod(kind, len(ends))
        key = f"{ADJECTIVES[kind // len(NOUNS)]}-{NOUNS[kind % len(NOUNS)]}-{ends[end]}"
        needles.append((key, draw.randrange(1_000_000, 10_000_000)))
    return needles


def _make_needle(draw: random.Random, size: int, depth: float) -> Sample:
    [(key, number)] = _draw_needles(draw, 1)
    sentences = [FILLER[i % len(FILLER)] for i in range(size)]
    sentences.insert(round(depth * size), _needle_of(key, number))
    return _ask_needle(" ".join(sentences), key, number)


def _make_multi_key_needle(draw: random.Random, size: int, depth: float) -> Sample:
    needles = _draw_needles(draw, size)
    asked = needles[round(depth * (size - 1))]
    return _ask_needle("\n".join(_needle_of(*needle) for needle in needles), *asked)


def _make_variable_tracking(draw: random.Random, size: int, _: float) -> Sample:
    names = _draw_names(draw, string.ascii_uppercase, 5, 2 * CHAIN)
    values = [str(number) for number in draw.sample(range(10_000, 100_000), 2)]
    chains = names[:CHAIN], names[CHAIN:]
    lines: list[list[str]] = []  # assignments of each chain, in its order
    for chain, value in zip(chains, values):
        before = (value, *(f"VAR {name}" for name in chain))
        lines.append([f"VAR {name} = {source}." for name, source in zip(chain, before)])
    order = draw.sample([0] * CHAIN + [1] * CHAIN, 2 * CHAIN)
    sentences = [FILLER[i % len(FILLER)] for i in range(size)]
    places = sorted(draw.randint(0, size) for _ in order)
    for shift, (place, which) in enumerate(zip(places, order)):
        sentences.insert(place + shift, lines[which].pop(0))
    prompt = (
        f"Track the variables that are assigned in this text.\n\n{' '.join(sentences)}\n\n"
        f"Question: Which variables have the value {values[0]}?\nAnswer: The variables of value {values[0]} are"
    )
    return Sample(prompt, tuple(chains[0]), f" {', '.join(chains[0])}")


def _make_common_words(draw: random.Random, size: int, _: float) -> Sample:
    # From 600 words on, common words come 30 times and the others 3 times. All come more often where words run out.
    rare = max(1, min(3, size // 200), -(-size // LARGEST_VOCABULARY))
    often = min(10 * rare, size // (2 * COMMON))  # common words are at most half of the list
    others = -(-(size - COMMON * often) // rare)
    drawn = draw.sample(VOCABULARY[: max(len(NOUNS), 2 * (others + COMMON))], others + COMMON)
    common, uncommon = drawn[:COMMON], drawn[COMMON:]
    words = common * often + (uncommon * rare)[: size - COMMON * often]
    draw.shuffle(words)
    prompt = (
        f"Ten words of this list come far more often than all others.\n\n{' '.join(words)}\n\n"
        "Question: Which ten words come most often?\nAnswer: The ten words are"
    )
    return Sample(prompt, tuple(common), f" {', '.join(common)}")


def _make_frequent_words(draw: random.Random, size: int, _: float) -> Sample:
    counts = [round(size * 0.6 / rank**2) for rank in range(1, size + 1)]
    counts = [count for count in counts if count]
    counts += [1] * (size - sum(counts))
    coded = _draw_names(draw, string.ascii_lowercase, 6, len(counts))
    words = [word for word, count in zip(coded, counts) for _ in range(count)]
    draw.shuffle(words)
    prompt = (
        f"This text is in code.\n\n{' '.join(words)}\n\n"
        "Question: Which three coded words come most often?\nAnswer: The three words are"
    )
    return Sample(prompt, tuple(coded[:FREQUENT]), f" {', '.join(coded[:FREQUENT])}")


TASKS = {
    "needle": Task(_make_needle, 1, has_depth=True),
    "multi_key_needle": Task(_make_multi_key_needle, 2, has_depth=True),
    "variable_tracking": Task(_make_variable_tracking, 1),
    "common_words": Task(_make_common_words, 6 * COMMON),
    "frequent_words": Task(_make_frequent_words, 40),
}


def score(words: Sequence[str], written: str) -> float:
    """The share of `words` that a model wrote, as whole words, in any order and case."""
    found = set(re.findall(r"[a-z0-9]+", written.lower()))
    return sum(word.lower() in found for word in words) / len(words)


class Tokenized(NamedTuple):
    """A sample for a model: the prompt's ids int64 [T], and how many tokens the model may write."""

    ids: np.ndarray
    new_tokens: int
    sample: Sample

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + self.new_tokens


class Samples:
    """`count` samples of a task, each of at most `length` tokens and nearly as many, new tokens included.

    `size` is 0 where any sample is too long even at its least size.
    """

    def __init__(self, name: str, length: int, tokenizer, seed: int, count: int):
        self.name, self.task, self.length, self.tokenizer = name, TASKS[name], length, tokenizer
        self.seed, self.count, self.size, least = seed, count, 0, TASKS[name].least
        if any(self._tokens(least, index) > length for index in range(count)):
            return
        small, large = (self._tokens(size) for size in (least, 4 * least + 50))
        self.size = least + int((length - small) * (3 * least + 50) / (large - small))
        # The two sizes above may have shorter words than a long text: correct what they predict.
        while self.size > least and (excess := self._tokens(self.size) - length) > 0:
            self.size -= max(1, int(self.size * excess / length))
        self.size = max(self.size, least)

    def _make(self, size: int, index: int) -> Tokenized:
        draw = random.Random(f"{self.seed} {self.name} {self.length} {index}")
        sample = self.task.make(draw, size, DEPTHS[index % len(DEPTHS)])
        answer = len(self.tokenizer.encode(sample.answer))  # a model may write a quarter more, and four
        return Tokenized(self.tokenizer.encode_from_start(sample.prompt), answer + answer // 4 + 4, sample)

    def _tokens(self, size: int, index: int = 0) -> int:
        return self._make(size, index).num_tokens

    def make(self, index: int) -> Tokenized:
        """Sample `index`. It depends on the seed and not on other samples; it is made smaller until it fits."""
        size = self.size
        while (made := self._make(size, index)).num_tokens > self.length:  # __init__ saw that the least size fits
            size = max(self.task.least, size - max(1, size // 200))
        return made


@dataclass
class Result:
    """The score of a task at a length: the mean over samples, and for each depth. None: the length is too short."""

    task: str
    length: int
    samples: int
    score: float | None
    by_depth: dict[float, float] | None = None


def judge(answer: Callable, samples: Samples, tick: Callable[[], None] = lambda: None) -> Result:
    """Ask all samples and score the answers; calls `tick` after each.

    `answer` takes a prompt's ids and the number of tokens to write at most, and returns the ids that it writes.
    """
    if samples.size == 0:
        return Result(samples.name, samples.length, 0, None)
    of_depth: dict[float, list[float]] = defaultdict(list)
    for index in range(samples.count):
        made = samples.make(index)
        written = samples.tokenizer.decode(answer(made.ids, made.new_tokens))
        of_depth[DEPTHS[index % len(DEPTHS)]].append(score(made.sample.words, written))
        tick()
    mean = sum(map(sum, of_depth.values())) / samples.count
    by_depth = {depth: sum(scores) / len(scores) for depth, scores in sorted(of_depth.items())}
    return Result(samples.name, samples.length, samples.count, mean, by_depth if samples.task.has_depth else None)
