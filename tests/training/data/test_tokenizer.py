"""Tokenizers of bytes and of files, and every refusal."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.data.test_packing import load_documents, make_loader
from training.data.prepare import prepare
from training.data.prepared import PreparedStore
from training.data.show import show_batch
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.data.tokens import TokenStore
from training.host.errors import UserError

BYTES = ByteTokenizer()


def write_tokenizer(path, special="<|endoftext|>", filler=0):
    """Writes a BPE over bytes to `path`; `filler` unused tokens make later ids large. Returns the
    path as text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: i
        for i, token in enumerate([*alphabet, *(f"unused {i}" for i in range(filler)), "he"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([AddedToken(special, special=True)])
    tokenizer.enable_truncation(max_length=2)  # meant for inference; it must not cut documents
    tokenizer.enable_padding(length=64, pad_token=special or "he")
    tokenizer.save(str(path))
    return str(path)


def test_byte_tokenizer_round_trip():
    text = "na\u00efve \u2192 \U0001f600"
    ids = BYTES.encode(text)
    assert (
        ids.dtype == np.uint8 and ids.tolist() == list(text.encode()) and BYTES.decode(ids) == text
    )
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
    [batch] = make_loader(documents, 3, 1, eos_id=tokenizer.eos_id).next_step()
    assert batch.input_ids.tolist() == [[70256, 70256, 70257]]


LINES, WORDS = (
    "he said:\n\n  x\n\u00e9\nhe\n" * 40 + "no newline" * 30,
    "he is here, and xx said x " * 60,
)


@pytest.mark.parametrize(
    "change, text, least",
    [
        ({}, LINES, 11), ({}, WORDS, 20), ({}, "\u4e2d\u6587\uff0c" * 200, 9), ({}, "x" * 999, 1),
        ({"add_prefix_space": True}, LINES, 11), ({"add_prefix_space": True}, WORDS, 20),
        ({"add_prefix_space": True}, "x\n" * 500, 1), ({"use_regex": False}, "x " * 500, 1),
    ],
)  # fmt: skip
def test_a_long_text_has_the_same_tokens_in_parts(tmp_path, monkeypatch, change, text, least):
    """A text is cut into `least` parts or more. It stays whole where it has no border of words or
    lines."""
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    content = json.loads(file.read_text())
    content["pre_tokenizer"].update(change)
    if "use_regex" in change:  # a token of "x" and the space behind it crosses words
        content["model"]["vocab"]["x\u0120"], content["model"]["merges"] = 300, [["x", "\u0120"]]
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    whole = [array.tolist() for array in tokenizer.encode_with_offsets(text)]
    assert tokenizer.encode(text).tolist() == whole[0]
    monkeypatch.setattr("training.data.tokenizer.PART", 50)
    parts = list(tokenizer._cut(text))
    assert "".join(parts) == text and (len(parts) >= least if least > 1 else len(parts) == 1)
    assert [array.tolist() for array in tokenizer.encode_with_offsets(text)] == whole
    assert tokenizer.encode(text).tolist() == whole[0]


def test_a_text_begins_as_the_file_says(tmp_path):
    """Llama's files begin texts so. A completion has no such beginning, and no text gets the file's
    end."""
    from tokenizers import Tokenizer, processors

    path = write_tokenizer(tmp_path / "tokenizer.json")
    plain = load_tokenizer(path)
    assert plain.encode_from_start("he").tolist() == plain.encode("he").tolist()
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<s>"])
    begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", begin), ("<|endoftext|>", end)]
    )
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    he = loaded.encode("he").tolist()
    assert loaded.encode_from_start("he").tolist() == [begin, *he]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("he")
    (folder / "b.jsonl").write_text('{"prompt": "", "completion": "he"}\n{"text": "he"}\n')
    documents = load_documents(folder, loaded, 1000)
    assert [document.tokens.tolist() for document in documents] == 3 * [[begin, *he]]
    assert documents[1].masked.tolist() == [True] + len(he) * [False]


def test_identity_is_of_the_content(tmp_path):
    paths = [
        write_tokenizer(tmp_path / name, special)
        for name, special in (("a", "</s>"), ("b", "</s>"), ("c", "<eos>"))
    ]
    one, same, other = (load_tokenizer(path).identity for path in paths)
    assert one == same != other and len(one) == 64
    assert load_tokenizer(None).identity == load_tokenizer("bytes").identity == "bytes"


@pytest.mark.parametrize(
    "special",
    ["<|im_end|>", "</s>", "<eos>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"],
)
def test_tokenizer_end_of_text(tmp_path, special):
    assert load_tokenizer(write_tokenizer(tmp_path / "t.json", special)).eos_id == 257


def test_a_huge_tokenizer_takes_no_memory(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(3 * 2**30)  # of which the disk stores nothing
    with pytest.raises(UserError, match=r"it has 3221225472 bytes, at most 268435456 are read"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_errors(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"t\.json has no token to end documents: .* one of <\|endoftext\|>, .*<\|im_end\|>",
    ):
        load_tokenizer(write_tokenizer(tmp_path / "t.json", special=None))
    with pytest.raises(
        ValueError, match=r"cannot read .*missing\.json: No such file.*; give --tokenizer"
    ):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"tokenizer .*bad\.json cannot be read: .*; give another tokenizer.json"
    ):
        load_tokenizer(str(tmp_path / "bad.json"))
    content = json.loads(Path(write_tokenizer(tmp_path / "panics.json")).read_text())
    pieces = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": {},
    }
    (tmp_path / "panics.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"tokenizer .*panics\.json cannot be read: no entry found for key; give"
    ):
        load_tokenizer(str(tmp_path / "panics.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="/python -m pip install tokenizers"):
        load_tokenizer("t.json")


def write_pieces(file, prepend):
    """Writes a tokenizer of pieces, as SentencePiece's, that marks spaces by Metaspace or by a
    normalizer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = [
        *"abcdefghijklmnopqrstuvwxyzPQ.:?,!\n\u2581\u00e9", "re", "\u2581re", "\u2581x", "\u2581P",
        "?\n",
        "\u2581\u2581",
    ]  # fmt: skip
    merges = [
        ("r", "e"),
        ("\u2581", "re"),
        ("\u2581", "x"),
        ("\u2581", "P"),
        ("?", "\n"),
        ("\u2581", "\u2581"),
    ]
    tokenizer = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)}, merges, unk_token="?")
    )
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(file))


def write_bytes(file, trim):
    from tokenizers import Tokenizer, processors

    write_tokenizer(file)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.save(str(file))


SAMPLES = [
    ("return x", ".context"), ("Q: re?\n", "Paris."), ("Q:", " Paris"), ("Q: ", "Paris"),
    ("", "he"), ("x re", "re"),
    ("what?", "\nre"), ("caf", "\u00e9 re"), ("h", "e x"), ("x", "  y"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["always", "first", "never", "normalizer", "bytes"])
def test_a_sample_has_the_tokens_of_the_whole_text(tmp_path, kind):
    """They are cut where the completion begins, by transformers' offsets. A token of both is a
    target."""
    from transformers import PreTrainedTokenizerFast

    file = tmp_path / "tokenizer.json"
    write_bytes(file, trim=False) if kind == "bytes" else write_pieces(file, kind)
    theirs, ours = PreTrainedTokenizerFast(tokenizer_file=str(file)), load_tokenizer(str(file))
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in SAMPLES))
    for (prompt, completion), document in zip(
        SAMPLES, load_documents(data, ours, 1000), strict=True
    ):
        expected = theirs(
            prompt + completion, return_offsets_mapping=True, add_special_tokens=False
        )
        assert document.tokens.tolist() == expected.input_ids
        masked = [
            stop <= len(prompt) and start < len(prompt) for start, stop in expected.offset_mapping
        ]
        assert document.masked.tolist() == masked


@pytest.mark.parametrize("kind", ["bytes", "trimmed bytes"])
def test_a_space_of_its_own_is_on_its_side_of_the_cut(tmp_path, kind):
    """A post-processor that trims offsets has a space begin where it ends, as if it were the
    completion's."""
    write_bytes(tmp_path / "tokenizer.json", trim=kind == "trimmed bytes")
    tokenizer = load_tokenizer(str(tmp_path))
    for prompt, completion in (("x ", "\nhe"), ("x", " \nhe"), (" ", "\n"), ("x  ", "\n")):
        ids, of_prompt = tokenizer.encode_sample(prompt, completion)
        assert (
            tokenizer.decode(ids[:of_prompt]) == prompt
            and tokenizer.decode(ids[of_prompt:]) == completion
        )
    assert tokenizer.encode_with_offsets(" \nx")[1].tolist() == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    "config", ['{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}', "{}"]
)
def test_a_text_may_begin_with_the_token_that_ends_texts(tmp_path, config):
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 257)]
    )
    tokenizer.save(path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    expected = AutoTokenizer.from_pretrained(tmp_path)("he").input_ids
    assert load_tokenizer(path).encode_from_start("he").tolist() == expected == [257, 256]


def test_the_cut_of_a_sample_is_shown(tmp_path):
    """A space that the completion begins with is shown, and none that it does not have."""
    write_pieces(tmp_path / "tokenizer.json", "always")
    tokenizer = load_tokenizer(str(tmp_path))
    for completion, shown in (
        (".context", "return x[[.context</s>]]"),
        (" x", "return x[[ x</s>]]"),
    ):
        (tmp_path / "a.jsonl").write_text(
            json.dumps({"prompt": "return x", "completion": completion})
        )
        documents = load_documents(tmp_path / "a.jsonl", tokenizer, 1000)
        loader = make_loader(documents, len(documents[0].tokens) + 1, 1, eos_id=tokenizer.eos_id)
        assert show_batch(loader, tokenizer).splitlines()[-1] == shown


def test_a_text_begins_and_ends_once(tmp_path):
    """A text that has its beginning or its end already, in any form of rows and in a prompt, gets
    no second one."""
    from tokenizers import Tokenizer, processors

    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 258)]
    )
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    begin, end, he, x = 258, 257, 256, loaded.encode("x")[0]
    folder = tmp_path / "data"
    folder.mkdir()
    ended = "<|endoftext|>"
    (folder / "a.txt").write_text(f"<s>he{ended}\n")
    (folder / "b.md").write_text(f"he{ended}")
    (folder / "c.jsonl").write_text(
        f'{{"text": "<s>he{ended}"}}\n{{"prompt": "<s>", "completion": "he{ended}"}}\n'
        f'{{"prompt": "", "completion": "<s>he{ended}\\n"}}\n{{"text": "he"}}\n'
    )
    store = TokenStore(load_documents(folder, loaded, 1000), loaded.eos_id)
    assert [store.read(i, 0, int(n)).tolist() for i, n in enumerate(store.lengths)] == 6 * [
        [begin, he, end]
    ]
    prepared = (
        PreparedStore(folder.parent / "set", loaded, 1000)
        if prepare(folder, tmp_path / "set", path)
        else None
    )
    assert [prepared.read(i, 0, int(n)).tolist() for i, n in enumerate(prepared.lengths)] == 6 * [
        [begin, he, end]
    ]
    assert (
        loaded.encode_from_start("<s>x").tolist()
        == loaded.encode_from_start("x").tolist()
        == [begin, x]
    )
