"""Corpus reading and its errors, packing, exact resume, and validation that counts every held-out token once."""

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.corpus import ByteTokenizer, Document, load_documents, load_tokenizer, split_documents
from training.data import PackedLoader, validation_batches

EOS = 0
BYTES = ByteTokenizer()


def make_documents(lengths, masked=0):
    """Documents whose tokens are all different and never EOS."""
    ids = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    return [Document(tokens, masked) for tokens in np.split(ids, np.cumsum(lengths)[:-1])]


def read_text(tmp_path, name, content):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(content)
    return load_documents(str(file), BYTES, 256)


def write_tokenizer(path, special="<|endoftext|>", filler=0):
    """A BPE over bytes, with filler unused tokens so that later ids are large."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(f"unused {i}" for i in range(filler)), "he"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([AddedToken(special, special=True)])
    tokenizer.enable_truncation(max_length=2)  # a setting for inference, which must not cut documents
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    return str(path)


def test_byte_tokenizer_round_trip():
    text = "na\u00efve \u2192 \U0001f600"
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint8 and ids.tolist() == list(text.encode()) and BYTES.decode(ids) == text
    assert (BYTES.vocab_size, BYTES.eos_id, BYTES.name) == (256, 0, "bytes")
    assert BYTES.decode(torch.tensor([104, 0xC3, 105, 70000])) == "h\ufffdi\ufffd"


def test_tokenizer_file_keeps_large_ids_and_all_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", filler=70000))
    ids = tokenizer.encode("hehe hx")
    assert ids.dtype == np.uint32 and len(ids) == 5
    assert ids[0] == ids[1] == 256 + 70000
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (256 + 70001, 256 + 70002)
    assert tokenizer.decode(torch.from_numpy(ids.astype(np.int64))) == "hehe hx"
    (tmp_path / "a.txt").write_text("hehe")
    documents = load_documents(str(tmp_path / "a.txt"), tokenizer, tokenizer.vocab_size)
    batch = PackedLoader(documents, 3, 1, tokenizer.eos_id, seed=0).next_batch()
    assert batch.input_ids.tolist() == [[70256, 70256, 70257]]


@pytest.mark.parametrize("special", ["<|im_end|>", "</s>", "<eos>", "<|end_of_text|>"])
def test_tokenizer_end_of_text(tmp_path, special):
    assert load_tokenizer(write_tokenizer(tmp_path / "t.json", special)).eos_id == 257


def test_tokenizer_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"t\.json has none of <\|endoftext\|>, .*<\|end_of_text\|>"):
        load_tokenizer(write_tokenizer(tmp_path / "t.json", special=None))
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*missing\.json.*No such file"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*bad\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        load_tokenizer("t.json")


def test_default_corpus():
    documents = load_documents(None, BYTES, 256)
    assert len(documents) > 100 and sum(len(document.tokens) for document in documents) > 2_000_000
    assert all(document.tokens.dtype == np.uint8 and document.tokens.all() for document in documents)
    assert any("def namedtuple(" in BYTES.decode(d.tokens) for d in documents if b"namedtuple" in d.tokens.tobytes())


def test_folder_is_read_in_order_and_text_files_only(tmp_path):
    for name, text in {
        "b/z.py": "z",
        "a.txt": "a",
        "b/c.MD": "c",
        "d.bin": "\0",
        "empty.py": "",
        "b/e.jsonl": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "x.jsonl").write_text('{"text": "one\\u2028line"}\r\n{"text": "two", "id": 3}\n')
    texts = [BYTES.decode(d.tokens) for d in load_documents([str(tmp_path), str(tmp_path / "a.txt")], BYTES, 256)]
    assert texts == ["a", "c", "z", "one\u2028line", "two", "a"]


def test_prompt_is_masked(tmp_path):
    (document,) = read_text(tmp_path, "a.jsonl", b'{"prompt": "ab", "completion": "cd"}')
    assert document.num_masked == 2 and BYTES.decode(document.tokens) == "abcd"
    batch = PackedLoader([document], 5, 1, EOS, seed=0).next_batch()
    assert batch.labels.tolist() == [[-100, -100, ord("c"), ord("d"), EOS]]
    assert batch.num_valid_tokens == 3


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("e.txt", b"", r"e\.txt is empty; give --data"),
        ("e.txt", b" \n", r"e\.txt is empty"),
        ("e.jsonl", b"", r"e\.jsonl is empty"),
        ("b.txt", b"abc\0d", r"b\.txt is binary: NUL byte at offset 3"),
        ("b.md", b"ab\xffd", r"b\.md is not UTF-8: byte 0xff at offset 2"),
        ("b.csv", b"abc", r"b\.csv has suffix '\.csv'; it must be one of \.txt, \.md, \.py, \.jsonl"),
        ("l.jsonl", b'{"text": "a"}\n{"text": \n', r"l\.jsonl:2: not JSON \(Expecting value\)"),
        ("l.jsonl", b'{"text": "a"}\n\n{"text": "b"}\n', r"l\.jsonl:2: not JSON"),
        ("l.jsonl", b'{"text": "a"}\n["text"]\n', r'l\.jsonl:2: needs a string "text"'),
        ("l.jsonl", b'{"text": "a"}\n"text"\n', r'l\.jsonl:2: needs a string "text"'),
        ("l.jsonl", b'{"txt": "a"}', r'l\.jsonl:1: needs a string "text"'),
        ("l.jsonl", b'{"text": 3}', r'l\.jsonl:1: needs a string "text"'),
        ("l.jsonl", b'{"text": ""}', r"l\.jsonl:1: empty text"),
        ("l.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"l\.jsonl:2 is not UTF-8: byte 0xff at offset 10"),
        ("l.jsonl", b'{"text": "a\\u0000"}', r"l\.jsonl:1: escaped NUL"),
        ("l.jsonl", b'{"text": "\\ud800"}', r"l\.jsonl:1: escaped NUL or lone surrogate"),
        ("l.jsonl", b'{"prompt": "a", "completion": ""}', r"l\.jsonl:1: empty text"),
        ("l.jsonl", b'{"completion": "a"}', r'l\.jsonl:1: needs .*"prompt" and "completion"'),
    ],
)
def test_bad_corpus(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_text(tmp_path, name, content)
    assert "\n" not in str(error.value)


def test_bad_paths_and_ids(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist; give --data"):
        load_documents([str(tmp_path / "nowhere")], BYTES, 256)
    (tmp_path / "image.png").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"folder .* has no text in any \.txt, \.md, \.py, \.jsonl file"):
        load_documents([str(tmp_path)], BYTES, 256)
    with pytest.raises(ValueError, match="empty list of paths"):
        load_documents([], BYTES, 256)
    with pytest.raises(ValueError, match=r"a\.txt: token id 122 is not below the model's vocab_size 100.*256 or more"):
        (tmp_path / "a.txt").write_text("az")
        load_documents(str(tmp_path / "a.txt"), BYTES, 100)


def test_split_holds_out_whole_documents():
    documents = make_documents([50, 3, 7, 40, 20, 9, 11, 60])
    train, held_out = split_documents(documents, 0.15, seed=5)
    again = split_documents(documents, 0.15, seed=5)
    assert [id(d) for part in again for d in part] == [id(d) for d in train + held_out]
    assert {id(d) for d in train + held_out} == {id(d) for d in documents} and len(train + held_out) == 8
    assert 0 < sum(len(d.tokens) for d in held_out) <= 0.15 * 200
    others = [split_documents(documents, 0.15, seed=s)[1] for s in range(6)]
    assert len({tuple(sorted(int(d.tokens[0]) for d in other)) for other in others}) > 1
    train, held_out = split_documents(documents, 0.001, seed=0)
    assert [len(d.tokens) for d in held_out] == [3] and len(train) == 7


def test_split_of_one_document():
    (document,) = make_documents([10], masked=2)
    (train,), (held_out,) = split_documents([document], 0.2, seed=0)
    assert train.tokens.tolist() == list(range(1, 9)) and train.num_masked == 2
    assert held_out.tokens.tolist() == [9, 10] and held_out.num_masked == 0
    with pytest.raises(ValueError, match="one document of 1 tokens is too short"):
        split_documents(make_documents([1]), 0.5, seed=0)
    with pytest.raises(ValueError, match=r"between 0 and 1.*1\.5"):
        split_documents([document], 1.5, seed=0)


def test_segments_and_masks():
    # With this seed the order is as given: 1 2 end 3 | 4 5 6 7, and the last end is dropped.
    batch = PackedLoader(make_documents([2, 5]), 4, 2, EOS, seed=0).next_batch()
    assert batch.input_ids.tolist() == [[1, 2, EOS, 3], [4, 5, 6, 7]]
    assert batch.labels.tolist() == [[-100, 2, EOS, -100], [-100, 5, 6, 7]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch.num_valid_tokens == 5
    assert (batch.input_ids.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
    assert batch.document_ids.dtype == torch.int32


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    context_length=st.integers(2, 17),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_packing_loses_and_duplicates_no_token(lengths, context_length, world_size, batch_size, seed):
    documents = make_documents(lengths)
    total = sum(lengths) + len(lengths)
    if total < context_length:
        with pytest.raises(ValueError, match=f"{total} training tokens is shorter than one context_length"):
            PackedLoader(documents, context_length, batch_size, EOS, seed)
        return
    loaders = [PackedLoader(documents, context_length, batch_size, EOS, seed, r, world_size) for r in range(world_size)]
    per_epoch = total // context_length
    sequences = []  # of two epochs and a little more, in the global order
    while len(sequences) < 2 * per_epoch:
        batches = [loader.next_batch() for loader in loaders]
        for row in range(batch_size):
            sequences += [(b.input_ids[row], b.labels[row], b.document_ids[row]) for b in batches]
        for batch in batches:
            assert batch.num_valid_tokens == int((batch.labels[:, 1:] != -100).sum())
    for epoch in range(2):
        random = np.random.default_rng([seed, epoch])
        order, places = random.permutation(len(documents)), random.permutation(per_epoch)
        stream = np.concatenate([np.append(documents[i].tokens, EOS) for i in order])
        owner = np.concatenate([np.full(lengths[i] + 1, rank) for rank, i in enumerate(order)])
        rows = sequences[epoch * per_epoch : (epoch + 1) * per_epoch]
        rows = [rows[i] for i in np.argsort(places)]  # as they lie in the stream
        packed = np.concatenate([ids.numpy() for ids, _, _ in rows])
        assert packed.tolist() == stream[: per_epoch * context_length].tolist()
        for i, (ids, labels, document_ids) in enumerate(rows):
            part = owner[i * context_length : (i + 1) * context_length]
            assert document_ids.tolist() == (part - part[0]).tolist()
            starts_segment = np.append(True, part[1:] != part[:-1])
            assert labels.tolist() == np.where(starts_segment, -100, ids.numpy()).tolist()


def take(loader, count):
    return [loader.next_batch().input_ids for _ in range(count)]


def test_resume_is_exact_and_independent_of_the_number_of_ranks():
    documents = make_documents([5, 17, 2, 9, 30, 11, 8])

    def make(rank=0, world_size=1, batch_size=2):
        return PackedLoader(documents, 6, batch_size, EOS, 3, rank, world_size)

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
    assert torch.equal(torch.cat([batch for _ in range(6) for rank in ranks for batch in take(rank, 1)]), expected)
    assert ranks[0].state_dict() == ranks[1].state_dict() == one.state_dict()
    assert one.epoch == 22 / 14


@pytest.mark.parametrize(
    "change, message",
    [
        ({"context_length": 5}, "context_length 4, this run 5"),
        ({"seed": 1}, "seed 0, this run 1"),
        ({"eos_id": 7}, "eos_id 0, this run 7"),
        ({"documents": make_documents([9, 8])}, "corpus_crc32"),
        ({"documents": make_documents([8, 9], masked=1)}, "corpus_crc32"),
    ],
)
def test_state_of_another_corpus_is_refused(change, message):
    arguments = {"documents": make_documents([8, 9]), "context_length": 4, "batch_size": 1, "eos_id": EOS, "seed": 0}
    state = PackedLoader(**arguments).state_dict()
    with pytest.raises(ValueError, match=f"cannot resume: .*{message}"):
        PackedLoader(**{**arguments, **change}).load_state_dict(state)


def test_more_accumulation_than_data():
    loader = PackedLoader(make_documents([39]), 10, 1, EOS, seed=0, world_size=2)
    loader.check_enough_for_step(2)
    with pytest.raises(ValueError, match=r"takes 6 sequences of 10 tokens .*_steps 3 x 2 ranks.* corpus has 4; lower"):
        loader.check_enough_for_step(3)
    with pytest.raises(ValueError, match="at least 2"):
        PackedLoader(make_documents([39]), 0, 1, EOS, seed=0)


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 4), (3, 2), (5, 3)])
@pytest.mark.parametrize("lengths", [[1], [4, 1, 12, 7, 3], [19, 20, 21]])
def test_validation_counts_every_token_once(lengths, world_size, batch_size):
    documents = make_documents(lengths)
    ranks = [list(validation_batches(documents, 5, batch_size, EOS, r, world_size)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch.input_ids.shape == (batch_size, 5) for batches in ranks for batch in batches)
    targets = torch.cat([b.labels[:, 1:].flatten() for batches in ranks for b in batches])
    targets = targets[targets != -100]
    # All tokens but each document's first, and each document's end.
    expected = [t for d in documents for t in d.tokens[1:].tolist()] + [EOS] * len(documents)
    assert sorted(targets.tolist()) == sorted(expected)
    assert sum(b.num_valid_tokens for batches in ranks for b in batches) == len(expected)
    for batch in (b for batches in ranks for b in batches):
        assert (batch.document_ids.diff(dim=1) >= 0).all()
        same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
        assert (batch.labels[:, 1:][~same] == -100).all()


def test_validation_limit_does_not_depend_on_ranks():
    documents = make_documents([19, 20, 21])

    def targets(world_size):
        ranks = [validation_batches(documents, 5, 2, EOS, r, world_size, limit=7) for r in range(world_size)]
        return sorted(t for batches in ranks for b in batches for t in b.labels[:, 1:].flatten().tolist() if t != -100)

    assert targets(1) == targets(3) and len(targets(1)) == 7 * 4 - 1  # one document's start inside
