"""Data settings of a run: the packing they choose, refusals, and the output of --show_batch."""

import json
import logging
import re

import pytest

import train
from tests.runs import interrupt, metrics, only_resume
from training.data.__main__ import main as prepare
from training.data.corpus import load_corpus
from training.data.loader import PackedLoader
from training.data.packing import BestFitPacking, ConcatenatedPacking, MixedPacking
from training.data.show import show_batch
from training.data.sources import Reading
from training.data.tokenizer import ByteTokenizer
from training.objectives.decide import text_reader

BYTES = ByteTokenizer()


@pytest.fixture
def paths(tmp_path):
    """Two files: 40 texts of 4 to 43 bytes; 12 samples of nine bytes of prompt and three more, the
    last 2 repeated."""
    text, samples = tmp_path / "text.jsonl", tmp_path / "samples.jsonl"
    text.write_text("\n".join(json.dumps({"text": "t" * n}) for n in range(4, 44)))
    lines = [{"prompt": f"question{i}", "completion": f"{i}!."} for i in range(10)]
    samples.write_text("\n".join(map(json.dumps, [*lines, *lines[:2]])))
    return [str(text), str(samples)]


def load(paths, context_length=48, **settings):
    return load_corpus(
        paths,
        BYTES,
        256,
        validation_fraction=0.1,
        context_length=context_length,
        seed=0,
        **settings,
    )


def test_samples_stay_whole_and_texts_are_cut(paths, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(load(paths[:1])[2], ConcatenatedPacking)
    train_store, held_out, packing = load(paths[1:])
    assert (
        isinstance(packing, BestFitPacking)
        and len(train_store.lengths) == 11
        and len(held_out.lengths) == 1
    )
    assert "data: best_fit fills 74.5% of 4 sequences" in caplog.text  # 11 x 13 of 4 x 48 tokens
    assert isinstance(load(paths)[2], BestFitPacking)
    assert isinstance(load(paths[1:], packing="concatenate")[2], ConcatenatedPacking)
    train_store, _, mixed = load(paths, weights="1,3")
    assert (
        isinstance(mixed, MixedPacking)
        and "['concatenate', 'best_fit']" in mixed.identity["packing"]
    )
    firsts = [train_store.source(mixed.spans(0, index)[0][0]) for index in range(8)]
    assert sum(first.startswith(paths[1]) for first in firsts) == 6


def test_documents_that_are_too_long(paths, caplog):
    with pytest.raises(
        ValueError, match=r"\d+ of \d+ training documents, .*% of the tokens, .*"
    ) as error:
        load(paths[:1], 20, packing="best_fit")
    source, longest = re.search(
        r"the longest (.*text\.jsonl:\d+) with (\d+); raise", str(error.value)
    ).groups()
    train_store, _, _ = load(paths[:1], int(longest), packing="best_fit")  # which takes all
    assert int(longest) == max(train_store.lengths)
    assert source in {
        train_store.source(i) for i, n in enumerate(train_store.lengths) if n == int(longest)
    }
    for overlong, word in (("drop", "left out"), ("split", "split")):
        caplog.clear()
        store, _, packing = load(paths[:1], 20, packing="best_fit", overlong=overlong)
        assert f"are longer than context_length 20: {word}" in caplog.text
        spans = [p for index in range(packing.sequences_per_epoch) for p in packing.spans(0, index)]
        total = sum(b - a for _, a, b in spans)
        assert total == sum(n for n in store.lengths if overlong == "split" or n <= 20)
        assert PackedLoader(store, packing, 1).num_tokens == total


@pytest.mark.parametrize("settings, message", [
    ({"overlong": "drop", "packing": "concatenate"}, "overlong has no effect where documents are "
                                                     "concatenated"),
    ({"weights": "1"}, "must be 2 numbers above 0, 2147483647 at most, one for each path of "
                       "--data, .* got '1'"),
    ({"weights": "1,x"}, "must be 2 numbers"),
    ({"weights": "1,nan"}, "must be 2 numbers"),
    ({"weights": "1,0"}, "must be 2 numbers"),
    ({"weights": "1e308,1e308"}, "must be 2 numbers"),
    ({"weights": "1e-320,1"}, "must be 2 numbers"),
    ({"weights": "1,1e9"}, "less than 1 / 10,000 of all"),
    ({"context_length": 12, "weights": "1,1"}, r"12 of 12 training documents|11 of 11 training "
                                               r"documents"),
])  # fmt: skip
def test_settings_that_do_not_go_together(paths, settings, message):
    with pytest.raises(ValueError, match=message):
        load(paths, **settings)
    with pytest.raises(ValueError, match="data_weights mix several paths of --data: got 1"):
        load(paths[:1], weights="1")


def test_reasoning_of_chats_is_refused_where_there_are_none(paths, tmp_path, capsys):
    """Texts are refused before they are read. A resumed run keeps a setting that no flag has
    given."""
    text = tmp_path / "a.txt"
    text.write_text("a text")
    run = [
        "--output_dir",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        "--show_batch",
        "--context_length",
        "64",
    ]
    on_text = f"chat_reasoning has no effect on {text}, a text without rows; drop it"
    for data, message in (
        ([str(text)], on_text),
        (paths, "chat_reasoning has no effect without chats; drop it"),
    ):
        assert train.main([*run, "--data", *data, "--chat_reasoning", "keep"]) == 1
        assert message in capsys.readouterr().err
        with pytest.raises(ValueError, match=message):
            load(data, reading=Reading("keep", needs_chats=True))
    assert load(paths, reading=Reading("keep"))
    assert prepare(
        [
            "prepare",
            str(text),
            str(tmp_path / "set"),
            "--tokenizer",
            "bytes",
            "--chat_reasoning",
            "drop",
        ]
    )
    assert on_text in capsys.readouterr().err and not (tmp_path / "set").exists()


def test_a_batch_is_shown_with_its_targets(paths):
    store, _, packing = load(paths[1:], 28)
    loader = PackedLoader(store, packing, 1)
    shown = show_batch(loader, BYTES).splitlines()
    [(one, _, _), (two, _, _)] = loader.spans(0)
    assert shown[0] == "sequence 0: 2 documents, 8 of 28 tokens are trained on, 2 are padding"
    assert shown[1] == f"--- {store.source(one)}, tokens 0 to 12, 4 of them trained on"
    number = int(store.source(one).rpartition(":")[2]) - 1
    assert (
        shown[2] == f"question{number % 10}[[{number % 10}!.\0]]" and store.source(two) in shown[3]
    )
    assert "\033[32m[[" in show_batch(loader, BYTES, color=True) and loader.next_sequence == 0


def test_flags_of_a_run(paths, tmp_path, capsys):
    """--show_batch prints and ends before a model is built. A resumed run keeps its packing."""
    flags = [
        "--data",
        *paths,
        "--context_length",
        "64",
        "--batch_size",
        "1",
        "--device",
        "cpu",
        "--sample_tokens",
        "0",
    ]
    flags += ["--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--data_weights", "1,1"]
    flags += ["--validation_sequences", "2"]
    assert train.main([*flags, "--show_batch"]) == 0
    assert "tokens are trained on" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert train.main(flags) == 0
    resume = [
        "--output_dir",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        "--resume",
        "--max_steps",
        "2",
    ]
    capsys.readouterr()
    assert train.main([*resume, "--data_weights", "1,2"]) == 1
    assert (
        "cannot resume: the checkpoint's data has data_weights 1,1, this run 1,2"
        in capsys.readouterr().err
    )
    assert train.main([*resume, "--packing", "best_fit"]) == 1
    assert "data has packing ['concatenate', 'best_fit'], this run" in capsys.readouterr().err
    assert train.main(resume) == 0


def documents(store):
    return sorted(bytes(store.read(i, 0, int(n)).tolist()) for i, n in enumerate(store.lengths))


def test_validation_data_are_held_out_whole(paths, tmp_path):
    """Nothing of --data is held out, in any form of data; the held-out documents come in random
    order."""
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(json.dumps({"prompt": "q", "completion": f"{i}"}) for i in range(9)))
    assert prepare(["prepare", str(own), str(tmp_path / "set"), "--tokenizer", "bytes"]) in (
        0,
        None,
    )
    for path in (str(own), str(tmp_path / "set")):
        train_store, held_out, packing = load(paths, validation_data=[path])
        assert (
            len(train_store.lengths) == 52
            and packing.sequences_per_epoch == load(paths)[2].sequences_per_epoch + 2
        )
        assert documents(held_out) == [b"q%d\0" % i for i in range(9)]
        assert [held_out.source(i) for i in range(9)] != [f"{own}:{i}" for i in range(1, 10)]
        assert held_out.read_masked(0, 0, 3)[1].tolist() == [True, False, False]
        assert held_out.identity == load(paths[:1], validation_data=[path])[1].identity
    assert sorted(load(paths[:1], validation_data=paths[1:])[1].lengths) == [13] * 12
    whole, _, _ = load([str(own)], validation_data=paths)
    assert documents(whole) == documents(held_out)


def test_documents_that_would_be_held_out_and_trained_on_are_refused(paths, tmp_path):
    text, samples = paths
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link.jsonl").symlink_to(text)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "text.jsonl").read_bytes())
    for others in ([text], [samples, str(tmp_path / "folder")], [str(tmp_path)]):
        with pytest.raises(
            ValueError, match=r"data has \S+jsonl and \S+jsonl, which are one file; leave one out"
        ):
            load([text, *others])
    with pytest.raises(
        ValueError, match="two paths of data have the same documents; leave one out"
    ):
        load([text, str(tmp_path / "copy.jsonl")])


def test_all_paths_are_looked_for_before_any_is_read(paths, tmp_path, monkeypatch):
    (tmp_path / "paper.pdf").write_bytes(b"%PDF")
    monkeypatch.setattr(
        "training.data.corpus.read_documents", lambda *_: pytest.fail("a corpus was read")
    )
    for more, message in (
        ("nowhere", "nowhere does not exist; give {}data"),
        ("paper.pdf", "make text of it: pdftotext"),
    ):
        with pytest.raises(ValueError, match=message.format("--")):
            load([*paths, str(tmp_path / more)])
        with pytest.raises(ValueError, match=message.format("--validation_")):
            load(paths, validation_data=[str(tmp_path / more)])


def test_validation_data_that_say_nothing_are_refused(paths, tmp_path):
    text, samples = paths
    empty, link, copy = tmp_path / "empty.txt", tmp_path / "link.jsonl", tmp_path / "copy.jsonl"
    empty.write_text(" \n")
    link.symlink_to(text)
    copy.write_bytes((tmp_path / "text.jsonl").read_bytes())
    assert prepare(["prepare", text, str(tmp_path / "set"), "--tokenizer", "bytes"]) in (0, None)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "hard.jsonl").hardlink_to(text)
    for path in (text, str(link), str(folder), str(tmp_path / "set")):
        with pytest.raises(
            ValueError, match=r"jsonl is in validation_data and in data; take it out of one of them"
        ):
            load(paths, validation_data=[samples.replace("samples", "nowhere"), path][1:])
    with pytest.raises(
        ValueError, match=r"copy\.jsonl:1 has the documents that a path of data has"
    ):
        load(paths, validation_data=[str(copy)])
    with pytest.raises(ValueError, match=r"set/part-\w+\.tokens is in validation_data and in data"):
        load([str(tmp_path / "set")], validation_data=[str(tmp_path / "set")])
    with pytest.raises(
        ValueError, match=r"empty\.txt has nothing to read: .*; give other --validation_data$"
    ):
        load(paths, validation_data=[str(empty)])
    with pytest.raises(
        ValueError, match=r"nowhere does not exist; give --validation_data a file or a folder"
    ):
        load(paths, validation_data=["nowhere"])


@pytest.mark.parametrize("objective", ["dpo", "grpo", "weighted"])
def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path, caplog, objective):
    """Once each, however many answers they have; texts with weights have no prompts."""
    for name, prompts in (("a", "abcc"), ("b", "xccb"), ("other", "xy")):
        rows = [
            {"prompt": each, "chosen": f"{i}{name}", "rejected": "-"}
            for i, each in enumerate(prompts)
        ]
        if objective == "grpo":
            rows = [
                {
                    "prompt_ids": [ord(each), 9],
                    "completion_ids": [i, ord(name[0])],
                    "advantage": i + 1,
                }
                for i, each in enumerate(prompts)
            ]
        elif objective == "weighted":
            rows = [{"text": each + name * 9, "weight": 2.0} for each in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, count in (("other", 0), ("b", 2)):
        reading = Reading(rows=text_reader(objective, BYTES.eos_id, 64))
        load(
            [str(tmp_path / "a.jsonl")],
            validation_data=[str(tmp_path / f"{name}.jsonl")],
            reading=reading,
        )
        said = "data: 2 of 3 prompts of validation_data are in data, too; " in caplog.text
        assert (
            said == bool(count and objective != "weighted") and ("prompts" in caplog.text) == said
        )


def test_a_run_validates_on_the_same_texts_when_it_goes_on(paths, tmp_path, capsys, caplog):
    own, folder = tmp_path / "own.txt", tmp_path / "run"
    own.write_text("held out " * 60)
    flags = [
        "--data",
        paths[0],
        "--validation_data",
        str(own),
        "--context_length",
        "32",
        "--batch_size",
        "1",
    ]
    flags += [
        "--device",
        "cpu",
        "--sample_tokens",
        "0",
        "--max_steps",
        "2",
        "--warmup_steps",
        "1",
        "--save",
        "full",
    ]
    flags += [
        "--validation_interval",
        "1",
        "--validation_sequences",
        "3",
        "--checkpoint_interval",
        "1",
    ]
    caplog.set_level(logging.INFO)
    assert train.main([*flags, "--output_dir", str(folder)]) == 0
    assert "data: a validation reads 3 of 18 held-out sequences" in caplog.text
    expected = [line["validation_loss"] for line in metrics(folder)]
    interrupt(folder, 1, tmp_path / "lost")
    assert train.main(only_resume(folder)) == 0
    assert [line["validation_loss"] for line in metrics(folder)] == expected
    own.write_text("others " * 60)
    capsys.readouterr()
    assert train.main(only_resume(folder, "--max_steps", "3")) == 1
    assert (
        "cannot resume: the held-out documents have changed since the checkpoint"
        in capsys.readouterr().err
    )
    inside = [*flags, "--output_dir", str(tmp_path / "other"), "--log_file", str(own)]
    assert train.main(inside) == 1 and "lies in data" in capsys.readouterr().err


def test_validation_data_without_a_target(tmp_path, paths, capsys):
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    flags = [
        "--device",
        "cpu",
        "--output_dir",
        str(tmp_path / "run"),
        "--show_batch",
        "--context_length",
        "8",
    ]
    assert train.main([*flags, "--data", paths[0], "--validation_data", str(own)]) == 1
    assert str(own) in capsys.readouterr().err
    own.write_text(json.dumps({"prompt": "a" * 200, "completion": "b"}))
    sequences = ["--validation_sequences", "2", "--batch_size", "1"]
    assert train.main([*flags, *sequences, "--data", paths[0], "--validation_data", str(own)]) == 1
    assert "the first 2 held-out sequences have no token to be predicted" in capsys.readouterr().err
