"""A needle in a haystack: a sentence with a number in repeated filler, and a question for it.

A prompt ends with the start of the answer, as in RULER (arXiv 2404.06654): a model without chat
tuning continues it. The score is the share of samples whose number the model writes. Nothing is
downloaded: every sample has a seed.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # place of a needle in its text: 0 at the start, 1 at the end
FILLER = (
    "The river runs past the old mill.",
    "A boat waits at the pier.",
    "The wind is mild today.",
    "We walk up the hill and rest.",
    "Someone left the gate open.",
    "It will rain before the evening.",
)
WORDS = Path(__file__).with_name("words.txt").read_text()
ADJECTIVES, NOUNS = (part.split() for part in WORDS.split("\n\n"))


class Sample(NamedTuple):
    """A prompt, and the answer to it."""

    ids: np.ndarray  # int64 [T]
    new_tokens: int  # the model may write so many at most
    number: str  # the model should write it

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + self.new_tokens


class Samples:
    """`count` samples, each of at most `length` tokens and nearly as many, new tokens included.

    `size`, in sentences of filler, is 0 where any sample is too long even with one sentence.
    """

    def __init__(self, length: int, tokenizer, seed: int, count: int):
        self.length, self.tokenizer = length, tokenizer
        self.seed, self.count, self.size = seed, count, 0
        if any(self._make(1, index).num_tokens > length for index in range(count)):
            return
        # A line through the tokens of two sizes predicts the size that has `length` tokens.
        small, large = (self._make(size, 0).num_tokens for size in (1, 54))
        self.size = 1 + int((length - small) * (54 - 1) / (large - small))
        # A long text may have longer words than the two: correct what they predict.
        while self.size > 1 and (excess := self._make(self.size, 0).num_tokens - length) > 0:
            self.size = max(1, self.size - max(1, int(self.size * excess / length)))

    def _make(self, size: int, index: int) -> Sample:
        draw = random.Random(f"{self.seed} needle {self.length} {index}")
        kind, end = divmod(draw.randrange(len(ADJECTIVES) * len(NOUNS) * 90), 90)
        key = f"{ADJECTIVES[kind // len(NOUNS)]}-{NOUNS[kind % len(NOUNS)]}-{10 + end}"
        number = str(draw.randrange(1_000_000, 10_000_000))
        sentences = [FILLER[i % len(FILLER)] for i in range(size)]
        place = round(DEPTHS[index % len(DEPTHS)] * size)
        sentences.insert(place, f"The magic number of {key} is {number}.")
        prompt = (
            f"Remember the magic numbers in this text.\n\n{' '.join(sentences)}\n\n"
            f"Question: What is the magic number of {key}?\nAnswer: The magic number of {key} is"
        )
        # A model may write a quarter more, and four.
        answer = len(self.tokenizer.encode(f" {number}"))
        return Sample(self.tokenizer.encode_from_start(prompt), answer + answer // 4 + 4, number)

    def make(self, index: int) -> Sample:
        """Makes a sample by the seed and its index alone, smaller until it fits."""
        size = self.size
        sample = self._make(size, index)
        while sample.num_tokens > self.length:  # __init__ saw that one sentence fits
            size = max(1, size - max(1, size // 200))
            sample = self._make(size, index)
        return sample


@dataclass
class Result:
    """The score at a length: the mean over samples, and for each depth; None: it is too short."""

    task: str  # always "needle"; files of earlier versions have others
    length: int
    samples: int
    score: float | None
    by_depth: dict[float, float] | None = None


def judge(answer: Callable, samples: Samples, tick: Callable[[], None] = lambda: None) -> Result:
    """Asks all samples and scores the answers; calls `tick` after each.

    `answer(ids of a prompt, tokens to write at most)` returns the ids that it writes.
    """
    if samples.size == 0:
        return Result("needle", samples.length, 0, None)
    hits_by_depth: dict[float, list[bool]] = defaultdict(list)
    for index in range(samples.count):
        sample = samples.make(index)
        written = samples.tokenizer.decode(answer(sample.ids, sample.new_tokens))
        is_hit = sample.number in re.findall(r"[a-z0-9]+", written.lower())
        hits_by_depth[DEPTHS[index % len(DEPTHS)]].append(is_hit)
        tick()
    by_depth = {depth: sum(hits) / len(hits) for depth, hits in sorted(hits_by_depth.items())}
    mean = sum(map(sum, hits_by_depth.values())) / samples.count
    return Result("needle", samples.length, samples.count, mean, by_depth)
