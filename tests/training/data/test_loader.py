"""Exact resume, and validation that counts every held-out token once."""

import json

import numpy as np
import pytest
import torch

from tests.training.data.test_packing import EOS, make_documents, make_loader
from training.data.loader import PackedLoader, make_batch, validation_batches
from training.data.packing import BestFitPacking, ConcatenatedPacking
from training.data.sources import Document
from training.data.tokens import TokenStore


def take(loader, count):
    return [batch.input_ids for _ in range(count) for batch in loader.next_step()]


def test_resume_is_exact_and_independent_of_the_number_of_ranks():
    documents = make_documents([5, 17, 2, 9, 30, 11, 8])

    def make(rank=0, world_size=1, batch_size=2):
        return make_loader(documents, 6, batch_size, 3, rank, world_size)

    assert make().sequences_per_epoch == 14
    one = make()
    take(one, 5)
    state = json.loads(json.dumps(one.state_dict()))
    expected = torch.cat(take(one, 6))  # into the second epoch
    resumed = make()
    resumed.load_state_dict(state)
    assert torch.equal(torch.cat(take(resumed, 6)), expected)
    ranks = [make(rank, world_size=2, batch_size=1) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for of_step in expected.split(2):
        assert sorted(torch.cat([take(rank, 1)[0] for rank in ranks]).tolist()) == sorted(
            of_step.tolist()
        )
    assert ranks[0].state_dict() == ranks[1].state_dict() == one.state_dict()
    assert one.epoch == 22 / 14


def test_batches_made_ahead_are_the_same_and_are_no_part_of_the_position():
    store = TokenStore(make_documents([5, 17, 2, 9, 30, 11, 8]), EOS)

    def make(read_ahead):
        return PackedLoader(
            store, ConcatenatedPacking(store.lengths, 6, 3), 2, read_ahead=read_ahead
        )

    plain, ahead, resumed = make(False), make(True), make(True)
    for step in range(12):
        batches = (
            plain.next_step(1 + step // 6),
            ahead.next_step(1 + step // 6),
        )  # two micro-batches from step 6 on
        assert [a.input_ids.tolist() for a in batches[0]] == [
            b.input_ids.tolist() for b in batches[1]
        ]
        assert plain.state_dict() == ahead.state_dict()
    resumed.next_step()
    resumed.load_state_dict(ahead.state_dict())
    assert torch.equal(resumed.next_step()[0].input_ids, plain.next_step()[0].input_ids)


@pytest.mark.parametrize("packing", [ConcatenatedPacking, BestFitPacking])
@pytest.mark.parametrize(
    "world_size, batch_size, micro_batches", [(2, 1, 4), (4, 1, 3), (3, 2, 1), (2, 1, 1)]
)
def test_ranks_share_a_steps_sequences_and_finish_together(
    world_size, batch_size, micro_batches, packing
):
    """Each step ends as early as if the ranks took turns, or earlier. The rank with most pairs ends
    a micro-batch."""
    lengths = np.random.default_rng(0).lognormal(3, 1.5, 300).astype(int) + 1
    documents, step = make_documents(lengths.tolist()), world_size * batch_size * micro_batches
    one = make_loader(documents, 128, 1, packing=packing)
    ranks = [
        make_loader(documents, 128, batch_size, 0, n, world_size, packing=packing)
        for n in range(world_size)
    ]

    def pairs(batch):
        return sum(n * (n + 1) // 2 for n in batch.documents.lengths)

    seconds = []
    while one.epoch < 2:
        in_order, dealt = one.next_step(step), [rank.next_step(micro_batches) for rank in ranks]
        rows = torch.cat([batch.input_ids for batches in dealt for batch in batches])
        assert sorted(rows.tolist()) == sorted(
            torch.cat([batch.input_ids for batch in in_order]).tolist()
        )
        together = np.array([[pairs(batch) for batch in batches] for batches in dealt]).max(0).sum()
        in_turns = np.array([pairs(batch) for batch in in_order]).reshape(
            micro_batches, batch_size, world_size
        )
        seconds.append((together, in_turns.sum(1).max(1).sum()))
    together, in_turns = np.array(seconds).T
    assert (together <= in_turns).all() and (together < in_turns).any() == (
        batch_size * micro_batches > 1
    )


@pytest.mark.parametrize("change, message", [
    ({"context_length": 5}, "context_length 4, this run 5"),
    ({"seed": 1}, "seed 0, this run 1"),
    ({"eos_id": 7}, "eos_id 0, this run 7"),
    ({"documents": make_documents([9, 8])}, "the training documents have changed .* by "
                                            "--init_from$"),
    ({"documents": make_documents([8, 9], masked=1)}, "the training documents have changed since "
                                                      "the checkpoint"),
])  # fmt: skip
def test_state_of_another_corpus_is_refused(change, message):
    arguments = {
        "documents": make_documents([8, 9]),
        "context_length": 4,
        "batch_size": 1,
        "eos_id": EOS,
        "seed": 0,
    }
    state = make_loader(**arguments).state_dict()
    assert list(state) == [
        "next_sequence",
        "context_length",
        "seed",
        "packing",
        "eos_id",
        "corpus_crc32",
    ]
    with pytest.raises(ValueError, match=f"cannot resume: .*{message}"):
        make_loader(**{**arguments, **change}).load_state_dict(state)


def test_more_accumulation_than_data():
    loader = make_loader(make_documents([39]), 10, 1, world_size=2)
    loader.check_enough_for_step(2)
    with pytest.raises(
        ValueError,
        match=r"takes 6 sequences of 10 tokens .*_steps 3 x 2 ranks.* corpus has 4; lower",
    ):
        loader.check_enough_for_step(3)


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 4), (3, 2), (5, 3)])
@pytest.mark.parametrize("lengths", [[1], [4, 1, 12, 7, 3], [19, 20, 21]])
def test_validation_counts_every_token_once(lengths, world_size, batch_size):
    documents = make_documents(lengths)
    store = TokenStore(documents, EOS)
    ranks = [
        list(validation_batches(store, 5, batch_size, r, world_size)) for r in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch.input_ids.shape == (batch_size, 5) for batches in ranks for batch in batches)
    targets = torch.cat([b.targets.flatten() for batches in ranks for b in batches])
    targets = targets[targets != -100]
    # Targets are all tokens except each document's first, and each document's end.
    expected = [t for d in documents for t in d.tokens[1:].tolist()] + [EOS] * len(documents)
    assert sorted(targets.tolist()) == sorted(expected)
    assert sum(b.num_valid_tokens for batches in ranks for b in batches) == len(expected)
    for batch in (b for batches in ranks for b in batches):
        border = batch.documents.positions_BT[:, 1:] == 0
        assert (batch.targets[:, :-1][border] == -100).all() and (
            batch.targets[:, -1] == -100
        ).all()


def test_validation_limit_does_not_depend_on_ranks():
    store = TokenStore(make_documents([19, 20, 21]), EOS)

    def targets(world_size):
        ranks = [validation_batches(store, 5, 2, r, world_size, limit=7) for r in range(world_size)]
        return sorted(
            t
            for batches in ranks
            for b in batches
            for t in b.targets.flatten().tolist()
            if t != -100
        )

    assert targets(1) == targets(3) and len(targets(1)) == 7 * 4 - 1  # one document's start inside


def test_lengths_of_packed_documents_are_those_of_the_batches():
    """The lengths are the first epoch's, in the order of its sequences. The longest holds for every
    epoch."""
    documents = [Document(np.full(size, 7, dtype=np.uint8)) for size in (3, 30, 1, 11, 2, 9, 0, 21)]
    loader = make_loader(documents, 12, 1, seed=3)
    lengths, sequences = loader.packing.document_lengths()
    assert loader.packing.longest_document == 12
    assert make_loader(documents, 50, 1, seed=3).packing.longest_document == 31
    for index in range(loader.sequences_per_epoch):
        [batch] = loader.next_step()
        assert sorted(batch.documents.lengths) == sorted(lengths[sequences == index].tolist())


def test_padding_is_short_documents(monkeypatch):
    """Documents of padding have at most 4 tokens here, also in a sequence that is padding alone."""
    monkeypatch.setattr("training.data.packing.PADDING_TOKENS", 4)
    loader = make_loader(make_documents([7, 7, 7]), 15, 1, packing=BestFitPacking)
    assert loader.next_step()[0].documents.lengths == [8, 4, 3]
    assert loader.packing.document_lengths()[0].tolist() == [8, 8, 8] + 3 * [4, 3]
    [batch] = validation_batches(TokenStore(make_documents([7]), EOS), 8, 1, rank=1, world_size=2)
    assert batch.num_valid_tokens == 0 and batch.documents.lengths == [4, 4]


@pytest.mark.parametrize("size", [1, 2, 6])
def test_slices_of_a_shared_sequence_make_up_the_whole(size):
    for documents in ([3, 30, 1, 11], [60]):  # packed, and one document in each sequence
        [batch] = make_loader(make_documents(documents, masked=2), 12, 3).next_step()
        shares = [batch.slice(rank, size) for rank in range(size)]
        for whole, parts in (
            (batch.input_ids, [share.input_ids for share in shares]),
            (batch.targets, [share.targets for share in shares]),
            (batch.documents.positions_BT, [share.documents.positions_BT for share in shares]),
        ):
            assert all(part.shape == (3, 12 // size) for part in parts) and torch.equal(
                torch.cat(parts, 1), whole
            )
        assert sum(share.num_valid_tokens for share in shares) == batch.num_valid_tokens
        for share in shares:
            assert share.documents.segments is batch.documents.segments
            assert share.documents.lengths == batch.documents.lengths


@pytest.mark.parametrize("documents", [[3, 30, 1, 11], [60]])
def test_slices_of_an_odd_length_are_padded_with_a_document_without_targets(documents):
    [batch] = make_loader(make_documents(documents), 12, 3).next_step()
    shares = [batch.slice(rank, 5) for rank in range(5)]
    input_ids, targets, positions = (
        torch.cat([get(share) for share in shares], dim=1)
        for get in (lambda s: s.input_ids, lambda s: s.targets, lambda s: s.documents.positions_BT)
    )
    assert input_ids.shape == (3, 15) and torch.equal(input_ids[:, :12], batch.input_ids)
    assert torch.equal(targets[:, :12], batch.targets) and (targets[:, 12:] == -100).all()
    assert torch.equal(positions[:, :12], batch.documents.positions_BT)
    assert positions[:, 12:].tolist() == [[0, 1, 2]] * 3
    assert sum(share.num_valid_tokens for share in shares) == batch.num_valid_tokens
    whole, padded = batch.documents.segments, shares[0].documents.segments
    whole = torch.tensor([[row, 0, 12] for row in range(3)]) if whole is None else whole
    assert padded[padded[:, 1] < 12].tolist() == whole.tolist()
    assert padded[padded[:, 1] >= 12].tolist() == [[row, 12, 15] for row in range(3)]


def test_padding_is_no_text():
    """Two documents in a row of 1,200 tokens; a rank's half of a row of 7 tokens is padded by
    another."""
    store = TokenStore([Document(np.arange(5)), Document(np.arange(3))], EOS)
    batch = make_batch(store, [[(0, 0, 5)], [(1, 0, 3), (0, 0, 2)]], 1200)
    assert sorted(batch.text_lengths) == [2, 3, 5] and batch.num_valid_tokens == 4 + 2 + 1
    assert sum(batch.padding) == 2 * 1200 - 10 and sum(batch.documents.lengths) == 2 * 1200
    half = make_batch(store, [[(0, 0, 5)]], 7).slice(1, 2)
    assert half.text_lengths == [5] and sorted(half.padding) == [1, 2]
