"""Needles: an oracle that reads the prompt scores 1, letters at random score 0; lengths, depths and
seeds are kept."""

import random
import re

from training.data.tokenizer import ByteTokenizer
from training.evaluation.needle import DEPTHS, Samples, judge

BYTES = ByteTokenizer()


def oracle(ids, max_new_tokens):
    """The right answer, read from the prompt's text alone."""
    _, text, question = BYTES.decode(ids).split("\n\n")
    key = re.search(r"magic number of ([\w-]+)\?", question)[1]
    [number] = re.findall(rf"magic number of {key} is (\d+)\.", text)
    return BYTES.encode(f" {number}")


def test_an_oracle_scores_one_and_random_letters_nothing():
    samples = [Samples(length, BYTES, seed=3, count=7) for length in (1100, 5000)]
    for one in samples:
        found = judge(oracle, one)
        assert (found.score, found.samples, found.length) == (1.0, 7, one.length)
        assert found.by_depth == dict.fromkeys(DEPTHS, 1.0)
    draw = random.Random(0)
    letters = lambda _, count: [draw.randrange(32, 127) for _ in range(count)]  # noqa: E731
    assert judge(letters, samples[0]).score == 0


def test_samples_fill_their_length_and_depend_on_seed_and_index():
    samples, other = Samples(3000, BYTES, seed=0, count=5), Samples(3000, BYTES, seed=1, count=5)
    made = [samples.make(index) for index in range(5)]
    assert all(2700 < one.num_tokens <= 3000 for one in made)
    assert len({BYTES.decode(one.ids) for one in [*made, other.make(0)]}) == 6
    assert (Samples(3000, BYTES, seed=0, count=5).make(3).ids == made[3].ids).all()
    assert all(len(BYTES.encode(f" {one.number}")) <= one.new_tokens for one in made)


def test_a_needle_lies_at_its_depth():
    samples = Samples(4000, BYTES, seed=0, count=5)
    for index, depth in enumerate(DEPTHS):
        sample = samples.make(index)
        text = BYTES.decode(sample.ids).split("\n\n")[1]
        [place] = [match.start() / len(text) for match in re.finditer(sample.number, text)]
        assert depth - 0.03 < place < depth + 0.03


def test_a_length_without_room():
    sizes = []
    for length in range(225, 250):  # around the shortest prompts: their keys differ in length
        samples = Samples(length, BYTES, seed=0, count=5)
        assert all(samples.make(index).num_tokens <= length for index in range(5) if samples.size)
        sizes.append(samples.size)
    assert sizes[0] == 0 and sizes[-1] == 1 and sizes.count(0) > 5
    found = judge(oracle, Samples(225, BYTES, seed=0, count=5))
    assert found.score is None and found.samples == 0
