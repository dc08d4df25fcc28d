"""Tasks: an oracle that reads the prompt scores 1, letters at random score 0; lengths, depths and seeds are kept."""

import random
import re
from collections import Counter

import pytest

from training.data.tokenizer import ByteTokenizer
from training.evaluation.tasks import DEPTHS, TASKS, Samples, judge, score

BYTES = ByteTokenizer()


def solve(prompt: str) -> str:
    """The right answer, read from the prompt's text alone."""
    _, text, question = prompt.split("\n\n")
    if asked := re.search(r"magic number of ([\w-]+)\?", question):
        [number] = re.findall(rf"magic number of {asked[1]} is (\d+)\.", text)
        return f" {number}"
    if asked := re.search(r"have the value (\d+)\?", question):
        known, assigned = {asked[1]}, re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        for name, source in assigned:
            known |= {name} if source in known else set()
        return ", ".join(known - {asked[1]})
    count = {"ten": 10, "three": 3}[re.search(r"Which (\w+) ", question)[1]]
    return " and ".join(word for word, _ in Counter(text.split()).most_common(count))


def oracle(ids, max_new_tokens):
    return BYTES.encode(solve(BYTES.decode(ids)))


@pytest.mark.parametrize("name", TASKS)
def test_an_oracle_scores_one_and_random_letters_nothing(name):
    samples = [Samples(name, length, BYTES, seed=3, count=7) for length in (1100, 5000)]
    assert all(one.size for one in samples)
    for one in samples:
        found = judge(oracle, one)
        assert (found.score, found.samples, found.task, found.length) == (1.0, 7, name, one.length)
        assert found.by_depth == (dict.fromkeys(DEPTHS, 1.0) if TASKS[name].has_depth else None)
    draw = random.Random(0)
    letters = lambda _, count: [draw.randrange(32, 127) for _ in range(count)]  # noqa: E731
    assert judge(letters, samples[0]).score == 0


@pytest.mark.parametrize("name", TASKS)
def test_samples_fill_their_length_and_depend_on_seed_and_index(name):
    samples, other = Samples(name, 3000, BYTES, seed=0, count=5), Samples(name, 3000, BYTES, seed=1, count=5)
    made = [samples.make(index) for index in range(5)]
    lengths = [len(one.ids) + one.new_tokens for one in made]
    assert all(2700 < length <= 3000 for length in lengths)
    assert len({one.sample for one in [*made, other.make(0)]}) == 6
    assert Samples(name, 3000, BYTES, seed=0, count=5).make(3).sample == made[3].sample
    assert all(len(BYTES.encode(one.sample.answer)) <= one.new_tokens for one in made)
    assert all(score(one.sample.words, one.sample.answer) == 1 for one in made)


@pytest.mark.parametrize("name", ["needle", "multi_key_needle"])
def test_a_needle_lies_at_its_depth(name):
    samples = Samples(name, 4000, BYTES, seed=0, count=5)
    for index, depth in enumerate(DEPTHS):
        sample = samples.make(index).sample
        text = sample.prompt.split("\n\n")[1]
        [place] = [match.start() / len(text) for match in re.finditer(sample.words[0], text)]
        assert depth - 0.03 < place < depth + 0.03


def test_half_an_answer_and_a_length_without_room():
    assert score(("ab", "cd"), "AB, cde") == 0.5
    samples = Samples("common_words", 300, BYTES, seed=0, count=5)
    found = judge(oracle, samples)
    assert samples.size == 0 and found.score is None and found.samples == 0
    sizes = []
    for length in range(225, 250):  # around the shortest prompts: their keys differ in length
        needle = Samples("needle", length, BYTES, seed=0, count=5)
        made = [needle.make(index) for index in range(5) if needle.size]
        assert all(len(one.ids) + one.new_tokens <= length for one in made)
        sizes.append(needle.size)
    assert sizes[0] == 0 and sizes[-1] == 1 and sizes.count(0) > 5


def test_common_words_come_ten_times_as_often():
    """As in RULER: 30 times against 3, where the list is long enough."""
    sample = TASKS["common_words"].make(random.Random(0), 5000, 0.0)
    counts = Counter(sample.prompt.split("\n\n")[1].split())
    assert {counts.pop(word) for word in sample.words} == {30}
    assert max(counts.values()) == 3 and sum(counts.values()) == 5000 - 300
    longest = Counter(TASKS["common_words"].make(random.Random(0), 100_000, 0.0).prompt.split("\n\n")[1].split())
    (_, often), *_ = longest.most_common(10)[-1:]
    assert often == 100 and longest.most_common(11)[-1][1] == 10
