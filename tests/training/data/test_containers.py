"""Files of rows: the same documents from each kind, directly and prepared; damaged files, bombs,
missing packages."""

import csv
import gzip
import io
import json
import logging
import random
import sys

import pyarrow
import pytest
from pyarrow import parquet

from tests.training.data.test_packing import load_documents
from tests.training.data.test_prepared import contents, one_process  # noqa: F401  a fixture
from tests.training.data.test_tokens import with_peak
from training.data import containers
from training.data.containers import read_rows
from training.data.corpus import load_corpus, open_stores
from training.data.prepare import prepare
from training.data.sources import Reading
from training.data.tokenizer import ByteTokenizer
from training.host.errors import UserError
from training.objectives.decide import decide_aim
from training.objectives.flags import ObjectiveFlags

BYTES = ByteTokenizer()
ROWS = [{"text": f"text {i} \u00e9\u4e2d" * i, "id": i} for i in range(1, 8)]
LINES = "\n".join(map(json.dumps, ROWS)).encode()
TABLE = pyarrow.Table.from_pylist(ROWS)


def arrow(table=TABLE, options=None):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=3)
    return sink.getvalue().to_pybytes()


def parquet_of(table=TABLE, row_group_size=2):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, row_group_size=row_group_size, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def zst(content):
    return pyarrow.compress(content, "zstd", asbytes=True)


def separated(separator=",", rows=ROWS):
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0]], delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


FILES = {
    "a.jsonl": LINES,
    "b.NDJSON": LINES + b"\n",
    "c.jsonl.gz": gzip.compress(LINES),
    "d.ndjson.zst": zst(LINES[:100]) + zst(LINES[100:]),  # a file may have several frames
    "e.json": json.dumps(ROWS, indent=2).encode(),
    "f.json": LINES,
    "g.json.gz": gzip.compress(b"\xef\xbb\xbf " + json.dumps(ROWS, ensure_ascii=False).encode()),
    "h.parquet": parquet_of(),
    "i.arrow": arrow(),
    "k.csv": b"\xef\xbb\xbf" + separated(),
    "l.TSV": separated("\t"),
    "m.csv.gz": gzip.compress(separated()),
    "n.tsv.zst": zst(separated("\t")),
}


def texts(path):
    return [BYTES.decode(document.tokens) for document in load_documents(str(path), BYTES, 256)]


def test_every_kind_has_the_same_documents_directly_and_prepared(
    tmp_path,
    caplog,
    monkeypatch,
    one_process,  # noqa: F811
):
    monkeypatch.setattr(containers, "CHUNK", 7)
    caplog.set_level(logging.INFO)
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
        assert texts(folder / name) == [row["text"] for row in ROWS], name
    assert caplog.messages == [f"data: {folder}/{name}: 7 rows of text" for name in FILES]
    (folder / "config.json").write_text('{"vocab_size": 3}')  # settings, not rows
    (folder / "z.txt.gz").write_bytes(gzip.compress(b"a text"))
    caplog.clear()
    [direct] = open_stores([str(folder)], BYTES, 256)
    index = prepare(folder, tmp_path / "set", "bytes")
    [prepared] = open_stores([str(tmp_path / "set")], BYTES, 256)
    assert contents(direct) == contents(prepared) and len(direct.lengths) == 7 * len(FILES) + 1
    assert sum(part["found"].get("rows of text", 0) for part in index["parts"]) == 7 * len(FILES)
    said = (
        f"data: left out files of other kinds in {folder}: 1 .json",
        f"data: {folder}: {7 * len(FILES)} rows of text, 1 file of text",
    )
    assert caplog.messages == [*said, *said]
    places = {direct.source(i).rpartition("/")[2] for i in range(len(direct.lengths))}
    assert {
        "a.jsonl:7", "c.jsonl.gz:2", "d.ndjson.zst:1", "e.json, row 3", "h.parquet, row 7",
        "i.arrow, row 6",
    } < places  # fmt: skip
    parts = [
        json.loads(file.read_text()).get("pieces", []) for file in (tmp_path / "set").glob("*.json")
    ]
    pieces = {tuple(piece) for part in parts for piece in part}
    assert sum(piece[0].endswith("h.parquet") for piece in pieces) == 4  # its row groups


@pytest.mark.parametrize(
    "name, content, message",
    [
        *((name, FILES[name][:-3], "") for name in ("c.jsonl.gz", "d.ndjson.zst", "g.json.gz", "h.parquet", "i.arrow")),
        *((name, FILES[name][:-3], "") for name in ("m.csv.gz", "n.tsv.zst")),
        *((name, FILES[name][:-40] + b"x" * 40, "") for name in ("c.jsonl.gz", "d.ndjson.zst", "h.parquet")),
        # a page fails its checksum
        ("h.parquet", FILES["h.parquet"].replace(b"text 7", b"text 8", 1), ""),
        ("i.arrow", FILES["i.arrow"][:200], "no end of an Arrow stream"),
        ("i.arrow", b"x" * 30 + FILES["i.arrow"][-8:], ""),
        ("i.arrow", b"", ""),
        ("h.parquet", b"", ""),
        ("a.txt.zst", b"no frame", ""),
    ],
    # bytes of .gz differ by the second
    ids=lambda value: value if isinstance(value, str) else len(value),
)  # fmt: skip
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{name} is damaged or cut short \(.*{message}.*\); get it again"
    ) as error:
        texts(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content, message", [
    (b'[{"text": "a"}', r"row 2: not JSON \(the file ends before it"),
    (b'[{"text": "a"},', r"row 2: not JSON \(Expecting value"),
    (b'[{"text": "a"} {"text": "b"}]', r"row 2: not JSON \(there is no comma before it"),
    (b'[{"text": "a"}] 3', r"row 2: not JSON \(the array has ended before it"),
    (b'[{"text": "a"}, {"text": "b]', r"row 2: not JSON \(Unterminated string"),
    (b'{"text": "a"}\n{"text" "b"}' + b" " * 99, r"row 2: not JSON \(Expecting ':' delimiter"),
    (b'[{"text": "a"}, ["b"]]', "row 2: is not an object but a list"),
    (b'[{"txt": "a"}]', 'row 1: has the fields "txt"; known are'),
    (b"[" * 200_000, "row 1: not JSON"),
    (b'["\xff"]', "is not UTF-8: byte 0xff; convert it"),
    (b" ", "has nothing to read"),
    (b"[]", "has nothing to read"),
])  # fmt: skip
def test_bad_arrays(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.json(, )? ?{message}") as error:
        texts(tmp_path / "a.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, content, message", [
    ("a.csv", "text,id\na,1\nb", "row 2: has 1 fields, the header 2; quote fields with ',' in "
                                 "them; mend that row"),
    ("a.csv", "text,id\na, b,1", "row 1: has 3 fields, the header 2; quote"),
    ("a.csv", 'text\n"a', r"row 1: not CSV \(unexpected end of data\)"),
    ("a.csv", 'text\na\n"b"c', r"row 2: not CSV \(',' expected after '\"'\)"),
    ("a.csv", '"text"s,id\na,b', r": not CSV \(',' expected after '\"'\)"),
    ("a.csv", "text,text\na,b", "has two columns named 'text'"),
    ("a.csv", "prompt;completion\na;b", "has ';' between its fields, not ','; write it with ','"),
    ("a.csv", "prompt\tcompletion\na\tb", "has .* between its fields, not .*; rename it to .tsv"),
    ("a.tsv", "prompt,completion\na,b", r"has ',' between its fields, not '\\t'; write it with"),
    ("a.csv", "foo,bar\na,b", 'row 1: has the fields "foo", "bar"; known are "text"; .*; --columns '
                              'text=NAME'),
    ("a.csv", "text\n\xff", "is not UTF-8: byte 0xff"),
    ("a.csv", "text\n", "has nothing to read"),
    ("a.csv", "", "has nothing to read"),
])  # fmt: skip
def test_bad_csv(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content.encode("latin1"))
    with pytest.raises(UserError, match=rf"{name}(, )? ?{message}") as error:
        texts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_fields_of_csv_are_texts_numbers_truths_and_lists(tmp_path):
    """A row may have several lines. An index of pandas has no name. An empty number is none."""
    (tmp_path / "a.csv").write_text(
        ',prompt,completion\r\n0,a,"5, ""x""\r\ny"\r\n\r\n1,,7\r\n', newline=""
    )
    assert texts(tmp_path / "a.csv") == ['a5, "x"\r\ny', "7"]
    (tmp_path / "b.csv").write_text(
        "text,loss,weight\na,True,\nb,False,\nc,,1\nd,FALSE,\ne,TRUE,\n"
    )
    assert texts(tmp_path / "b.csv") == ["a", "c", "e"]
    (tmp_path / "c.csv").write_text('text,loss_on_turns\na,"[0, 1]"')
    with pytest.raises(UserError, match='has "loss_on_turns", which is not obeyed'):
        texts(tmp_path / "c.csv")
    asked = [{"role": "user", "content": "a"}]
    (tmp_path / "d.csv").write_bytes(separated(rows=[{"messages": json.dumps(asked)}]))
    with pytest.raises(UserError, match="chats need a chat template"):
        texts(tmp_path / "d.csv")
    history = json.dumps([["a", "b"]])
    (tmp_path / "e.csv").write_bytes(
        separated(rows=[{"instruction": "c", "output": "d", "history": history}])
    )
    with pytest.raises(
        UserError, match="chats need a chat template"
    ):  # Alpaca's text has no place for it
        texts(tmp_path / "e.csv")


@pytest.mark.parametrize("objective, header, rows, columns", [
    ("weighted", "text,weight", ["ab,0.5", "cd,"], {"weight": {0.5, 1}}),
    ("kto", "prompt,completion,kto_tag", ["a,5,True", "b,6,false"], {"label": {0, 1}}),
    ("grpo", "prompt_ids,completion_ids,logprobs,advantage", ['"[5, 6]","[7]","[-1]",0.5'] * 2, {"advantage": {0.5}}),
    ("dpo", "question,system,chosen,rejected", ["a,,1,2"], {"answer": {0, 1}}),
])  # fmt: skip
def test_an_objective_reads_csv(tmp_path, objective, header, rows, columns):
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]))
    reader = decide_aim(ObjectiveFlags(objective=objective), 1).reader(0)
    [store] = open_stores([str(tmp_path)], BYTES, 256, Reading(rows=reader))
    assert {name: {*store.column(name).tolist()} for name in columns} == columns


def test_a_folders_csv_of_another_kind_is_left_out(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.csv").write_text("name,city\nA,B")
    (tmp_path / "c.csv").write_text("body,n\nA,1")
    assert texts(tmp_path) == ["a"] and "left out files of other kinds in" in caplog.text
    [store] = open_stores([str(tmp_path)], BYTES, 256, Reading(columns="text=body"))
    assert len(store.lengths) == 2


def test_bombs_take_little_memory(tmp_path, monkeypatch):
    """A megabyte of output per kilobyte of file."""
    monkeypatch.setattr(containers, "MOST", 2**18)
    monkeypatch.setattr(containers, "MOST_OF_TEXT", 2**18)
    monkeypatch.setattr(containers, "CHUNK", 2**14)
    for name, before, pack in (
        ("a.jsonl.gz", b'{"text": "', gzip.compress),
        ("b.ndjson.zst", b'{"text": "', zst),
        ("c.json.gz", b'[{"text": "', gzip.compress),
        ("d.txt.gz", b"", gzip.compress),
        ("e.csv.gz", b"text\n", gzip.compress),
        ("f.tsv.gz", b'text\n"b\n', gzip.compress),
    ):
        (tmp_path / name).write_bytes(pack(before + b"a" * 2**23))

        def read(name=name):
            with pytest.raises(ValueError, match=rf"{name}.* more than 262,144 bytes"):
                texts(tmp_path / name)

        assert with_peak(read)[1] < 2**22, name


def test_a_row_of_a_table_is_bounded(tmp_path, monkeypatch):
    """Checks a long value, one used by many rows, nulls that take no bytes in the file, and
    compressed batches."""
    monkeypatch.setattr(containers, "MOST", 2**18)
    monkeypatch.setattr(containers, "BATCH_BYTES", 2**20)
    long, short = "a" * 2**19, "b" * 2**17
    nulls = pyarrow.ListArray.from_arrays([0, 2**18], pyarrow.nulls(2**18))
    once = pyarrow.array([short] * 200)  # 25 MB, which the files hold once
    for name, table, message in (
        (
            "a.arrow",
            pyarrow.table({"text": ["", long]}),
            r"a\.arrow, row 2 has more than 262,144 bytes",
        ),
        ("b.arrow", pyarrow.table({"text": nulls}), r"b\.arrow, row 1 has more than 262,144 bytes"),
        ("c.arrow", pyarrow.table({"text": once.dictionary_encode()}), None),
        (
            "d.parquet",
            pyarrow.table({"text": [long]}),
            r"a row of .*d\.parquet, row group 0, has more than 262,144",
        ),
        (
            "e.parquet",
            pyarrow.table({"text": ["a", long, "b"]}),
            r"e\.parquet, row 2 has more than 262,144 bytes",
        ),
        ("f.parquet", pyarrow.table({"text": once}), None),
    ):
        (tmp_path / name).write_bytes(
            arrow(table) if name.endswith("arrow") else parquet_of(table, row_group_size=500)
        )

        def read(name=name, message=message):
            if message is None:
                assert sum(len(row["text"]) for _, row in read_rows(tmp_path / name)) == 200 * 2**17
                return
            with pytest.raises(UserError, match=message):
                [*read_rows(tmp_path / name)]

        usual = pyarrow.default_memory_pool()
        pyarrow.set_memory_pool(pool := pyarrow.proxy_memory_pool(usual))
        try:
            assert with_peak(read)[1] + pool.max_memory() < 2**23, name
        finally:
            pyarrow.set_memory_pool(usual)


@pytest.mark.parametrize("has_dictionary", [False, True])
def test_compressed_batches_are_refused(tmp_path, has_dictionary):
    column = pyarrow.array(["a" * 10_000])
    table = pyarrow.table({"text": column.dictionary_encode() if has_dictionary else column})
    (tmp_path / "a.arrow").write_bytes(
        arrow(table, pyarrow.ipc.IpcWriteOptions(compression="zstd"))
    )
    with pytest.raises(UserError, match=r"a\.arrow has compressed batches"):
        texts(tmp_path / "a.arrow")


def test_any_flipped_bit_of_a_table_is_data_or_one_line(tmp_path):
    """Checks bits of metadata and of offsets, behind which pyarrow raises SystemError, KeyError, or
    reads anywhere."""
    table = pyarrow.table(
        {"messages": [[{"role": "user", "content": "h\u00e9" * i}] * i for i in range(9)]}
    )
    draw, found = random.Random(0), {True: 0, False: 0}
    for name, content in (("a.arrow", arrow(table)), ("a.parquet", parquet_of(table))):
        for _ in range(250):
            flipped = bytearray(content)
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            (tmp_path / name).write_bytes(flipped)
            try:
                is_read = bool([*read_rows(tmp_path / name)])
            except UserError as error:
                assert "\n" not in str(error)
                is_read = False
            found[is_read] += 1
    assert min(found.values()) > 50


def test_missing_packages_are_named_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("not JSON")
    for name, package in (
        ("b.parquet", "pyarrow"),
        ("b.arrow", "pyarrow"),
        ("b.txt.zst", "backports.zstd"),
    ):
        with monkeypatch.context() as patch:
            for module in (package, "compression.zstd"):
                patch.setitem(sys.modules, module, None)
            (tmp_path / name).write_bytes(b"")
            wanted = rf"{name} needs the package {package}: .*python -m pip install {package}$"
            with pytest.raises(ValueError, match=wanted):
                texts(tmp_path)
            (tmp_path / name).unlink()


def test_tables_leave_out_what_is_null_in_objects(tmp_path):
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {"zone": "UTC"}}]
    rows = [
        {
            "messages": [
                {"role": "user", "tool_calls": None},
                {"role": "assistant", "tool_calls": calls},
            ],
            "n": None,
        }
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist([*rows, {"messages": None}]), tmp_path / "a.parquet"
    )
    expected = [{"role": "user"}, {"role": "assistant", "tool_calls": calls}]
    assert [*read_rows(tmp_path / "a.parquet")] == [
        (1, {"messages": expected, "n": None}),
        (2, {"messages": None, "n": None}),
    ]
    assert next(read_rows(tmp_path / "a.parquet", fields=frozenset({"messages"}))) == (
        1,
        {"messages": expected},
    )


CHATS = [
    {
        "messages": [
            {"role": "user", "content": None},
            {"role": "assistant", "tool_calls": [{"arguments": {"a": 1}}]},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"text": "a"}]},
            {"role": "assistant", "weight": 1},
        ]
    },
    {"messages": None},
]


def with_json():
    """A table as datasets 5 makes of messages whose fields differ; without its type, as an older
    pyarrow reads it."""
    chats = [row["messages"] for row in CHATS]
    values = [json.dumps(message) for chat in chats if chat for message in chat]
    offsets = pyarrow.array([0, 2, 4, 4], pyarrow.int32())
    texts, missing = pyarrow.array(values), pyarrow.array([False, False, True])
    typed = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts)
    lists = [pyarrow.ListArray.from_arrays(offsets, part, mask=missing) for part in (typed, texts)]
    part = pyarrow.field("item", pyarrow.string(), metadata={"ARROW:extension:name": "arrow.json"})
    older = pyarrow.schema([pyarrow.field("messages", pyarrow.list_(part))])
    return pyarrow.table({"messages": lists[0]}), pyarrow.table(
        [lists[1].cast(older[0].type)], schema=older
    )


def test_json_in_a_table_is_what_it_says(tmp_path):
    """Its nulls stay, as in lines of JSON."""
    typed, older = with_json()
    (tmp_path / "a.arrow").write_bytes(arrow(typed))
    (tmp_path / "b.parquet").write_bytes(parquet_of(typed))
    (tmp_path / "c.arrow").write_bytes(arrow(older))
    for name in ("a.arrow", "b.parquet", "c.arrow"):
        assert [row for _, row in read_rows(tmp_path / name)] == CHATS, name
    texts = pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(), pyarrow.array(['{"b": null}', "3", None])
    )
    struct = pyarrow.StructArray.from_arrays([texts, pyarrow.array([1, None, 2])], names=["j", "n"])
    (tmp_path / "d.arrow").write_bytes(arrow(pyarrow.table({"s": struct, "j": texts})))
    expected = [({"j": {"b": None}, "n": 1}, {"b": None}), ({"j": 3}, 3), ({"n": 2}, None)]
    assert [(row["s"], row["j"]) for _, row in read_rows(tmp_path / "d.arrow")] == expected


def test_damaged_json_in_a_table_is_a_row_that_cannot_be_read(tmp_path, caplog):
    texts = [json.dumps("a"), "{", "[" * 5000, json.dumps("b")]
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts))
    (tmp_path / "a.parquet").write_bytes(parquet_of(pyarrow.table({"text": column})))
    with pytest.raises(
        UserError,
        match=r"row 2: has a column of JSON that is none .* the 2 rows that cannot be read",
    ):
        open_stores([str(tmp_path)], BYTES, 256)
    [store] = open_stores([str(tmp_path)], BYTES, 256, Reading(bad_rows="drop"))
    assert len(store.lengths) == 2 and "left out rows that cannot be read: 2" in caplog.text


def save(folder, text, cache=None):
    """Writes a folder as `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    (folder / "data-00000-of-00001.arrow").write_bytes(arrow(pyarrow.table({"text": [text]})))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
    )
    if cache:
        (folder / "cache-0.arrow").write_bytes(arrow(pyarrow.table({"text": [cache]})))


def test_saved_datasets(tmp_path, caplog):
    save(tmp_path / "one", "a", cache="an earlier step")
    assert texts(tmp_path / "one") == ["a"]
    for split in ("train", "test"):
        save(tmp_path / "two" / split, split)
    splits = tmp_path / "two" / "dataset_dict.json"
    splits.write_text('{"splits": ["test", "train"]}')
    assert texts(tmp_path / "two") == ["train"] and texts(tmp_path / "two" / "test") == ["test"]
    assert texts(tmp_path) == ["a", "train"]
    assert {*caplog.messages} == {
        f"data: left out 1 .arrow in {tmp_path}/one, which its state.json does not name",
        f"data: {tmp_path}/two: split train is read; left out: test",
    }
    splits.write_text('{"splits": ["test", "validation"]}')
    with pytest.raises(
        ValueError, match="two has the splits test, validation; give --data the folder of one"
    ):
        texts(tmp_path / "two")
    splits.write_text('{"splits": ["test"]}')
    assert texts(tmp_path / "two") == ["test"]
    (tmp_path / "two" / "test" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(
        ValueError,
        match=r"test is not whole: data-00000-of-00001\.arrow of its state\.json is missing",
    ):
        texts(tmp_path / "two")
    for name in ("../one", str(tmp_path / "one"), ".", "..", "", "a\0b", "\ud800", 3, None):
        for file, content in (
            (splits, {"splits": [name]}),
            (splits, {"splits": ["train", name]}),
            (tmp_path / "one" / "state.json", {"_data_files": [{"filename": name}]}),
        ):
            file.write_text(json.dumps(content))
            with pytest.raises(
                UserError, match=rf"{file} names .*, which is no file of its folder"
            ):
                texts(file.parent)
    for content, file in (
        ("[]", splits),
        ('{"splits": 3}', splits),
        ("{}", tmp_path / "one" / "state.json"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"{file} is damaged"):
            texts(file.parent)


@pytest.mark.parametrize("name, suffixes, message", [
    ("a.rs", None, r"a\.rs has suffix '\.rs', not \.txt, \.md, .*; to read it as text, give "
                   r"--suffixes \.rs$"),
    ("a.rs.gz", None, r"suffix '\.gz', .*; to read it as text, give --suffixes \.rs$"),
    ("a.txt", ".rs", r"a\.txt has suffix '\.txt', not \.rs, \.jsonl, .*; to read it as text, give "
                     r"--suffixes \.txt"),
    ("a b.pdf", None, r"make text of it: pdftotext '.*/a b\.pdf' '.*/a b\.pdf'\.txt$"),
    ("a.docx", None, r"make text of it: pandoc -t plain -o .*/a\.docx\.txt .*/a\.docx$"),
    ("a.gz", None, r"decompress it, or rename it to tell its kind, as in NAME\.jsonl\.gz"),
    ("a.parquet.gz", None, "rename it to tell its kind"),
    ("Makefile", None, "rename it to tell its kind"),
    ("a.txt", ".csv", "suffixes must be of text files.*: got '.csv'"),
    ("a.txt", "rs", r"suffixes must be of text files, with commas between them, as \.rs,\.c: got "
                    r"'rs'"),
    ("a.txt", ".rs,", "suffixes must be of text files.*: got ''"),
    ("a.txt", ".rs,.parquet", "suffixes must be of text files.*: got '.parquet'"),
])  # fmt: skip
def test_files_of_other_kinds(tmp_path, name, suffixes, message):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=message) as error:
        open_stores([str(tmp_path / name)], BYTES, 256, Reading(suffixes=suffixes))
    assert "\n" not in str(error.value)


def test_a_binary_file_gets_no_hint_that_is_refused(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04\0\0")
    with pytest.raises(
        UserError, match=r"it is binary; make text or rows of it, as \.txt or \.jsonl"
    ):
        texts(tmp_path / "a.xlsx")


def test_flags_that_no_file_heeds(tmp_path, one_process):  # noqa: F811
    for name, flags, message in (
        (
            "a.txt",
            {"bad_rows": "drop"},
            r"bad_rows has no effect on .*a\.txt, a text without rows; drop it",
        ),
        (
            "a.jsonl",
            {"suffixes": ".rs"},
            r"suffixes has no effect on .*a\.jsonl, whose rows are read whatever",
        ),
    ):
        (tmp_path / name).write_text('{"text": "a"}')
        with pytest.raises(ValueError, match=message):
            open_stores([str(tmp_path / name)], BYTES, 256, Reading(**flags))
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path / name, tmp_path / "set", "bytes", reading=Reading(**flags))
    both = Reading(suffixes=".txt", bad_rows="drop")
    assert (
        len(open_stores([str(tmp_path / "a.txt"), str(tmp_path / "a.jsonl")], BYTES, 256, both))
        == 2
    )
    assert len(open_stores([str(tmp_path)], BYTES, 256, both)) == 1


def test_suffixes_and_names_of_the_hub(tmp_path, one_process):  # noqa: F811
    for name in ("a.RS", "b.h", "c.md"):
        (tmp_path / name).write_text(name)
    [store] = open_stores([str(tmp_path)], BYTES, 256, Reading(suffixes=".rs, .h"))
    assert [store.source(i).rpartition("/")[2] for i in range(len(store.lengths))] == [
        "a.RS",
        "b.h",
    ]
    assert (
        prepare(tmp_path, tmp_path / "set", "bytes", reading=Reading(suffixes=".rs,.h"))[
            "documents"
        ]
        == 2
    )
    with pytest.raises(ValueError, match="suffixes has no effect on prepared sets"):
        load_corpus(
            [str(tmp_path / "set")], BYTES, 256, validation_fraction=0.5, context_length=4, seed=0,
            reading=Reading(suffixes=".rs"),
        )  # fmt: skip
    with pytest.raises(
        ValueError,
        match=r"does not exist; .*: .*/bin/hf download no/such-data --repo-type dataset "
        r"--local-dir DIR",
    ):
        texts("no/such-data")
    with pytest.raises(ValueError, match=r"does not exist; give --data a file or a folder$"):
        texts(tmp_path / "such")


@pytest.mark.parametrize(
    "content", ['[{"text": "a"},\n{"text": "b"}]', '[\n{"text": "a"}\n]', '{\n"text": "a"\n}\n']
)
def test_other_json_in_a_file_of_lines_is_told_its_suffix(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"a.jsonl:1: not JSON .*; rename the file to .json; mend"):
        texts(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").rename(tmp_path / "a.json")
    assert texts(tmp_path / "a.json")[0] == "a"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_of_no_form_is_refused_with_all_its_columns(tmp_path, suffix):
    arrow = pytest.importorskip("pyarrow")
    row = {"question": "a", "thinking_trajectories": ["b"], "solution": "c", "attempt": "d"}
    table = arrow.Table.from_pylist([row])
    if suffix == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    else:
        with arrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
            stream.write_table(table)
    names = '"question", "thinking_trajectories", "solution", "attempt"'
    with pytest.raises(
        UserError,
        match=f"{names}; .*; --columns prompt=question,completion=solution reads such rows",
    ):
        texts(tmp_path / f"a.{suffix}")
