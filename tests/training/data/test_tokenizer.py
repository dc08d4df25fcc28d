"""Tokenizers of bytes and of files, and every refusal."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.data.test_packing import load_documents, make_loader
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.host.errors import UserError

BYTES = ByteTokenizer()


def write_tokenizer(path, special="<|endoftext|>", filler=0):
    """Writes a BPE over bytes to `path`; `filler` unused tokens make later ids large. Returns the path as text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(f"unused {i}" for i in range(filler)), "he"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([AddedToken(special, special=True)])
    tokenizer.enable_truncation(max_length=2)  # meant for inference; it must not cut documents
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
    [batch] = make_loader(documents, 3, 1, eos_id=tokenizer.eos_id).next_step()
    assert batch.input_ids.tolist() == [[70256, 70256, 70257]]


LINES, WORDS = "he said:\n\n  x\n\u00e9\nhe\n" * 40 + "no newline" * 30, "he is here, and xx said x " * 60


@pytest.mark.parametrize(
    "change, text, least",
    [
        ({}, LINES, 11), ({}, WORDS, 20), ({}, "\u4e2d\u6587\uff0c" * 200, 9), ({}, "x" * 999, 1),
        ({"add_prefix_space": True}, LINES, 11), ({"add_prefix_space": True}, WORDS, 20),
        ({"add_prefix_space": True}, "x\n" * 500, 1), ({"use_regex": False}, "x " * 500, 1),
    ],
)  # fmt: skip
def test_a_long_text_has_the_same_tokens_in_parts(tmp_path, monkeypatch, change, text, least):
    """A text is cut into `least` parts or more. It stays whole where it has no border of words or lines."""
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    content = json.loads(file.read_text())
    content["pre_tokenizer"].update(change)
    if "use_regex" in change:  # a token of "x" and the space behind it crosses words
        content["model"]["vocab"]["x\u0120"], content["model"]["merges"] = 300, [["x", "\u0120"]]
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    whole = [array.tolist() for array in tokenizer.encode_with_starts(text)]
    assert tokenizer.encode(text).tolist() == whole[0]
    monkeypatch.setattr("training.data.tokenizer.PART", 50)
    parts = list(tokenizer._cut(text))
    assert "".join(parts) == text and (len(parts) >= least if least > 1 else len(parts) == 1)
    assert [array.tolist() for array in tokenizer.encode_with_starts(text)] == whole
    assert tokenizer.encode(text).tolist() == whole[0]


def test_a_text_begins_as_the_file_says(tmp_path):
    """Llama's files begin texts so. A completion has no such beginning, and no text gets the file's end."""
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
        write_tokenizer(tmp_path / name, special) for name, special in (("a", "</s>"), ("b", "</s>"), ("c", "<eos>"))
    ]
    one, same, other = (load_tokenizer(path).identity for path in paths)
    assert one == same != other and len(one) == 64
    assert load_tokenizer(None).identity == load_tokenizer("bytes").identity == "bytes"


@pytest.mark.parametrize(
    "special", ["<|im_end|>", "</s>", "<eos>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
)
def test_tokenizer_end_of_text(tmp_path, special):
    assert load_tokenizer(write_tokenizer(tmp_path / "t.json", special)).eos_id == 257


def test_a_huge_tokenizer_takes_no_memory(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(3 * 2**30)  # of which the disk stores nothing
    with pytest.raises(UserError, match=r"it has 3221225472 bytes, at most 268435456 are read"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"t\.json has none of <\|endoftext\|>, .*<\|im_end\|>"):
        load_tokenizer(write_tokenizer(tmp_path / "t.json", special=None))
    with pytest.raises(ValueError, match=r"cannot read .*missing\.json: No such file.*; give --tokenizer"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer .*bad\.json cannot be read: .*; give another tokenizer.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    content = json.loads(Path(write_tokenizer(tmp_path / "panics.json")).read_text())
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}}
    (tmp_path / "panics.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer .*panics\.json cannot be read: no entry found for key; give"):
        load_tokenizer(str(tmp_path / "panics.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        load_tokenizer("t.json")
