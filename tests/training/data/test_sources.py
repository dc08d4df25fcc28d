"""Documents read from files, and every refusal of bad input."""

import gzip
import json
import logging

import numpy as np
import pytest

from tests.training.data.test_packing import EOS, load_documents, make_loader
from training.data import sources
from training.data.corpus import open_stores
from training.data.sources import Reading, read_documents
from training.data.tokenizer import ByteTokenizer
from training.host.errors import UserError
from training.objectives.decide import decide_aim
from training.objectives.flags import ObjectiveFlags

BYTES = ByteTokenizer()


def read_text(tmp_path, name, content):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(content)
    return load_documents(str(file), BYTES, 256)


def test_default_corpus(caplog):
    documents = load_documents(None, BYTES, 256)
    assert len(documents) > 100 and sum(len(document.tokens) for document in documents) > 2_000_000
    assert all(
        document.tokens.dtype == np.uint8 and document.tokens.all() for document in documents
    )
    assert any(
        "def namedtuple(" in BYTES.decode(d.tokens)
        for d in documents
        if b"namedtuple" in d.tokens.tobytes()
    )
    assert not caplog.records


def test_of_a_folder_with_splits_train_is_read(tmp_path, caplog):
    """Files as `hf download` makes them; without train, or as texts, all are read."""
    for name in ("data/train-00000-of-00001", "data/test-00000-of-00001", "en/validation", "more"):
        (tmp_path / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}')
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA dataset.")
    (tmp_path / "en/README.md").write_text("---\nlicense: mit\n---\nAnother dataset.")
    (tmp_path / "data/test.txt").write_text("text")

    def names(path):
        return sorted(str(file.relative_to(tmp_path)) for file in sources.find_files(path))

    assert names(tmp_path) == ["data/test.txt", "data/train-00000-of-00001.jsonl", "more.jsonl"]
    assert f"{tmp_path}: split train is read; left out: test, validation; give files" in caplog.text
    assert f"left out {tmp_path}/README.md, which describes a dataset" in caplog.text
    assert len(names(tmp_path / "data/test-00000-of-00001.jsonl")) == 1
    (tmp_path / "data/train-00000-of-00001.jsonl").unlink()
    assert len(names(tmp_path)) == 4
    (tmp_path / "README.md").write_text("# A text")
    assert "README.md" in names(tmp_path)


def test_folder_is_read_in_order_and_text_files_only(tmp_path):
    for name, text in {
        "b/z.py": "z", "a.txt": "a", "b/c.MD": "c", "d.bin": "\0", "empty.py": "", "b/e.jsonl": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "x.jsonl").write_text('{"text": "one\\u2028line"}\r\n{"text": "two", "id": 3}\n')
    texts = [BYTES.decode(d.tokens) for d in load_documents(str(tmp_path), BYTES, 256)]
    assert texts == ["a", "c", "z", "one\u2028line", "two"]


def test_what_teaches_nothing_is_left_out_counted_and_said(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\n\n{"text": " \\n"}\n \t\r\n{"prompt": "a", "completion": '
        b'""}\n{"text": "two"}'
        b"\n\n"
    )
    (tmp_path / "b.txt").write_text(" \n")
    for name in ("c.csv", "d.csv", "f.csv", "Makefile", "g.csv", "h.pdf"):
        (tmp_path / name).write_text("x")
    for name in ("broken.txt", "lost.txt"):
        (tmp_path / name).symlink_to("nowhere")
    documents = load_documents(str(tmp_path), BYTES, 256)
    assert [BYTES.decode(d.tokens) for d in documents] == ["one", "two"] and documents[1].line == 6
    assert [record.getMessage() for record in caplog.records] == [
        f"data: left out files of other kinds in {tmp_path}: 4 .csv, 2 .txt, 1 Makefile, 1 .pdf; "
        "text of a .pdf: pdftotext FILE FILE.txt",
        f"data: left out byte order marks: 1, the first in {tmp_path}/a.jsonl:1",
        f"data: left out blank lines: 3, the first in {tmp_path}/a.jsonl:2",
        f"data: left out rows without text: 1, the first in {tmp_path}/a.jsonl:3",
        f"data: left out rows with an empty answer: 1, the first in {tmp_path}/a.jsonl:5",
        f"data: left out files without text: 1, the first in {tmp_path}/b.txt",
    ]


def test_a_text_has_no_byte_order_mark(tmp_path, caplog):
    with caplog.at_level("INFO", "training.data.sources"):
        for name in ("a.txt", "b.txt.gz"):
            mark = "\ufeffhe".encode()
            (tmp_path / name).write_bytes(gzip.compress(mark) if name.endswith(".gz") else mark)
        documents = load_documents(str(tmp_path), BYTES, 256)
    assert [bytes(document.tokens.tolist()) for document in documents] == [b"he", b"he"]
    assert "left out byte order marks: 2, the first in" in caplog.text


def test_prompt_is_masked(tmp_path):
    (document,) = read_text(tmp_path, "a.jsonl", b'{"prompt": "ab", "completion": "cd"}')
    assert (
        document.masked.tolist() == [True, True, False, False]
        and BYTES.decode(document.tokens) == "abcd"
    )
    [batch] = make_loader([document], 5, 1, eos_id=EOS).next_step()
    assert batch.targets.tolist() == [[-100, ord("c"), ord("d"), EOS, -100]]
    assert batch.num_valid_tokens == 3


@pytest.mark.parametrize("name, content, message", [
    ("e.txt", b"", r"e\.txt has nothing to read: no text in any .*; give other --data"),
    ("e.txt", b" \n", r"e\.txt has nothing to read"),
    ("e.jsonl", b"", r"e\.jsonl has nothing to read"),
    ("b.txt", b"abc\0d", r"b\.txt is binary: NUL byte at offset 3"),
    ("b.md", b"ab\xffd", r"b\.md is not UTF-8: byte 0xff at offset 2"),
    ("b.log", b"abc", r"b\.log has suffix '\.log', not \.txt, .*; to read it as text, give "
                      r"--suffixes \.log"),
    ("l.jsonl", b'{"text": "a"}\n{"text": \n', r"l\.jsonl:2: not JSON \(Expecting value, character "
                                               r"11\)"),
    ("l.jsonl", b'{"text": "a"}\n\n{"text": \n', r"l\.jsonl:3: not JSON"),
    ("l.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"l\.jsonl:1: not JSON"),
    ("l.jsonl", b'{"text": "a"}\n["text"]\n', r"l\.jsonl:2: is not an object but a list; known are "
                                              r"objects"),
    ("l.jsonl", b'{"text": "a"}\n"text"\n', r"l\.jsonl:2: is not an object but a str"),
    ("l.jsonl", b'{"txt": "a"}',
     r'l\.jsonl:1: has the fields "txt"; known are "text"; "prompt" and "completion"; .*Alpaca'),
    ("l.jsonl", b'{"text": 3}', r'l\.jsonl:1: needs a string "text"'),
    ("l.jsonl", b'{"text": ""}\n\n', r"l\.jsonl has nothing to read"),
    ("l.jsonl", b'{"text": "a", "messages": [{"role": "user"}]}',
     r'l\.jsonl:1: has "text" beside "messages", where it would be'),
    ("l.jsonl", b'{"text": "a", "completion": "b", "prompt": "c"}', r'l\.jsonl:1: has "text" beside "completion"'),
    ("l.jsonl", b'{"text": "a", "prompt": "c"}', r'l\.jsonl:1: has "prompt" beside "text"'),
    ("l.jsonl", b'{"messages": [{"role": "user"}], "prompt": "c"}', r'l\.jsonl:1: has "prompt" beside "messages"'),
    ("l.jsonl", b'{"text": "a", "tools": [{}]}', r'l\.jsonl:1: has "tools" beside "text"'),
    ("l.jsonl", b'{"text": "a", "messages": null, "tools": []}\n{"txt": null}',
     r'l\.jsonl:2: has the fields "txt" \(null\); known are'),
    ("l.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"l\.jsonl:2: the line is not UTF-8: byte 0xff "
                                                    r"at offset 10"),
    ("l.jsonl", b'{"text": "a\\u0000"}', r"l\.jsonl:1: escaped NUL"),
    ("l.jsonl", b'{"text": "\\ud800"}', r"l\.jsonl:1: escaped NUL or lone surrogate"),
    ("l.jsonl", b'{"completion": "a"}', r'l\.jsonl:1: needs a string "prompt"'),
])  # fmt: skip
def test_bad_corpus(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_text(tmp_path, name, content)
    assert "\n" not in str(error.value)


def test_bad_paths_and_ids(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist; give --data"):
        load_documents(str(tmp_path / "nowhere"), BYTES, 256)
    (tmp_path / "image.png").write_bytes(b"\0")
    with pytest.raises(
        ValueError,
        match=r"ids0 has nothing to read: no text in any \.txt, \.md, \.py, \.jsonl, .* file",
    ):
        load_documents(str(tmp_path), BYTES, 256)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ValueError, match=r"link is a link to a folder, which is not followed"):
        load_documents(str(tmp_path), BYTES, 256)
    with pytest.raises(
        ValueError,
        match=r"a\.txt: token id 122 is not below the model's vocab_size 100.*256 or more",
    ):
        (tmp_path / "a.txt").write_text("az")
        load_documents(str(tmp_path / "a.txt"), BYTES, 100)


GOOD, BAD = '{"text": "good"}', '{"txt": "bad"}'


def test_rows_that_cannot_be_read_are_counted_and_refused_or_dropped(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD, BAD, "{", GOOD, '{"text": "\\u0000"}']))
    (tmp_path / "b.json").write_text(f"[{GOOD}, [3], {GOOD}]")
    (tmp_path / "c.txt").write_text("text")
    places = f"{tmp_path}/a.jsonl:2, {tmp_path}/a.jsonl:3, {tmp_path}/a.jsonl:5"
    for reading in (Reading(), Reading(bad_rows="refuse")):
        with pytest.raises(UserError) as error:
            list(read_documents(str(tmp_path), BYTES, 256, reading))
        message = str(error.value)
        assert (
            message.startswith(f'{tmp_path}/a.jsonl:2: has the fields "txt"; known are')
            and "\n" not in message
        )
        assert message.endswith(f"; mend the 4 rows that cannot be read, at {places}, or give "
                                "--bad_rows drop to leave "
                                "out such rows")  # fmt: skip
    documents = list(read_documents(str(tmp_path), BYTES, 256, Reading(bad_rows="drop")))
    assert [bytes(document.tokens) for document in documents] == [b"good"] * 4 + [b"text"]
    [warning] = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert warning.startswith(
        f"data: left out rows that cannot be read: 4, the first {places} (has the fields"
    )
    (tmp_path / "a.jsonl").write_text(BAD)
    with pytest.raises(UserError, match=r"a\.jsonl has nothing to read"):
        list(read_documents(str(tmp_path / "a.jsonl"), BYTES, 256, Reading(bad_rows="drop")))


def test_reading_ends_some_rows_after_one_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "READ_ON", 5)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("\n".join([GOOD, BAD, GOOD, BAD, GOOD] * 2))
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: .*; mend the 3 or more rows that cannot be read"
    ):
        list(read_documents(str(tmp_path), BYTES, 256))


def test_a_missing_template_is_no_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(UserError, match=r"a\.jsonl:1: chats need a chat template: .*, not bytes$"):
        list(read_documents(str(tmp_path / "a.jsonl"), BYTES, 256, Reading(bad_rows="drop")))


def test_a_row_that_is_nested_too_deeply_for_python_is_refused_by_its_line(tmp_path):
    """JSON is read to a depth that functions which follow its values do not reach."""
    row = {"prompt_ids": [1], "completion_ids": [2], "old_logprobs": [-1], "advantage": 1}
    reading = Reading(rows=decide_aim(ObjectiveFlags(objective="grpo"), 64).reader(0))
    for depth in range(930, 1000):
        text = json.dumps({**row, "prompt_ids": "deep"}).replace(
            '"deep"', "[" * depth + "]" * depth
        )
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(UserError, match=r"a\.jsonl:1: "):
            open_stores([str(tmp_path / "a.jsonl")], BYTES, 256, reading)
