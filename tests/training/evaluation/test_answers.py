"""Answers judged by an objective: as the run's own validation judged them, from stored references
to the last line."""

import json
import math
from pathlib import Path

import pytest

import train
from tests.runs import arguments, losses, metrics, weights_of_another_shape
from tests.training.data.templates import QWEN3
from tests.training.data.test_tokenizer import write_tokenizer
from training.evaluation import __main__ as evaluation
from training.logprobs import __main__ as logprobs
from training.objectives import stored as stored_ones
from training.objectives.stored import digest_of


def write(path, count, letter):
    rows = [
        {"prompt": f"{letter}{i} is", "chosen": f" good {i}", "rejected": f" BAD{i}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats_of(rows, reasoning):
    """The same pairs as chats, whose prompts have a turn with reasoning."""
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "What is it?")]
    prompt = [{"role": role, "content": content} for role, content in turns]
    prompt[1]["reasoning_content"] = reasoning
    rows = [
        {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
        for row in rows
    ]
    return [{"prompt": prompt, **row} for row in rows]


def test_references_of_another_attention_or_rope_scaling_are_refused(tmp_path, capsys, monkeypatch):
    """The same command with the run's own settings makes references with which the first loss is ln
    2.

    Weights are compared once in a run.
    """
    compared = []
    monkeypatch.setattr(
        stored_ones, "digest_of", lambda folder: compared.append(folder) or digest_of(folder)
    )
    base, data = (
        str(weights_of_another_shape(tmp_path, num_hidden_layers=1)),
        write(tmp_path / "data.jsonl", 9, "a"),
    )
    unread = str(tmp_path / "unread.jsonl")
    Path(unread).write_text("no JSON")
    known, cpu = (
        ["--objective", "dpo", "--context_length", "64"],
        ["--device", "cpu", "--data", data],
    )
    for words, own in (
        ("factor=4.0", "--rope_scaling yarn:4"),
        ("8 tokens", "--attention_type sparse --dense_below 8"),
    ):
        for name, made_with in (("other", []), ("same", own.split())):
            stored = tmp_path / (name + words * bool(made_with))
            if not stored.exists():
                assert logprobs.main([base, str(stored), *known, *made_with, *cpu]) == 0
            run = ["--init_from", base, "--reference_logprobs", str(stored), *known, *own.split()]
            assert train.main([*arguments(data, tmp_path / words / name, steps=1), *run]) == (
                name == "other"
            )
        run[run.index("--reference_logprobs") + 1] = str(tmp_path / "other")
        assert train.main([*arguments(unread, tmp_path / words / "none", steps=1), *run]) == 1
        assert len(compared) == 1 and not compared.clear()
        assert losses(tmp_path / words / "same")[0] == pytest.approx(math.log(2), abs=1e-6)
        refusal = capsys.readouterr().err
        assert refusal.count("was made with attention") == 2  # once before data are read
        assert "was made with attention everything before" in refusal and words in refusal


def test_log_probabilities_of_data_that_a_run_refuses_are_not_made(tmp_path, capsys):
    base, data = (
        str(weights_of_another_shape(tmp_path, num_hidden_layers=1)),
        write(tmp_path / "data.jsonl", 9, "a"),
    )
    known = ["--objective", "dpo", "--context_length", "64", "--device", "cpu", "--data", data]
    for more, message in (
        ([data], "which are one file"), (["--validation_data", data], "is in validation_data"),
        (["--chat_reasoning", "keep"], "chat_reasoning has no effect without chats; drop it"),
    ):  # fmt: skip
        assert logprobs.main([base, str(tmp_path / "out"), *known, *more]) == 1
        assert (
            message in capsys.readouterr().err and not (tmp_path / "out" / "logprobs.json").exists()
        )


def test_chats_are_judged_with_the_reasoning_that_the_run_kept(tmp_path):
    pytest.importorskip("jinja2")
    base = weights_of_another_shape(tmp_path, num_hidden_layers=1, vocab_size=300)
    (base / "chat_template.jinja").write_text(QWEN3)
    files = []
    for name in ("data", "held_out"):
        files.append(write(tmp_path / f"{name}.jsonl", 6, name))
        rows = chats_of(
            [*map(json.loads, Path(files[-1]).read_text().splitlines())], f"They greet the {name}."
        )
        Path(files[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--objective", "simpo", "--context_length", "256"
    more = (
        "--init_from",
        str(base),
        "--tokenizer",
        write_tokenizer(base / "tokenizer.json"),
        "--chat_reasoning",
        "keep",
    )
    run = arguments(
        files[0], tmp_path / "run", *flags, *more, "--validation_data", files[1], steps=1
    )
    assert train.main([*run, "--chat_reasoning", "keep"]) == 0
    out = "--output_dir", str(tmp_path / "out"), "--device", "cpu"
    assert (
        evaluation.main([str(tmp_path / "run" / "step_00000001"), "--data", files[1], *flags, *out])
        == 0
    )
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["answers"]
    assert found["loss"] == pytest.approx(
        metrics(tmp_path / "run")[-1]["validation_loss"], rel=1e-6
    )


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_held_out_pairs_are_judged_as_by_the_run(tmp_path, capsys, objective):
    base = str(weights_of_another_shape(tmp_path, num_hidden_layers=1))
    data, held_out = (
        write(tmp_path / "data.jsonl", 9, "a"),
        write(tmp_path / "held_out.jsonl", 5, "b"),
    )
    known, references = ["--objective", objective, "--context_length", "64"], [[], []]
    if objective == "dpo":
        for number, files in enumerate(
            (["--data", data, "--validation_data", held_out], ["--data", held_out])
        ):
            logprobs.main([base, str(tmp_path / f"of{number}"), *known, *files, "--device", "cpu"])
            references[number] = ["--reference_logprobs", str(tmp_path / f"of{number}")]
        targets = sum(len(f" good {i} BAD{i}") + 2 for i in range(5))
        assert f"of1: {targets} targets, " in capsys.readouterr().out
    run = tmp_path / "run"
    flags = arguments(
        data, run, "--init_from", base, "--validation_data", held_out, "--learning_rate", "0.01"
    )
    train.main([*flags, *known, *references[0]])
    last = metrics(run)[-1]
    out = ["--output_dir", str(tmp_path / "out"), "--device", "cpu"]
    evaluation.main([str(run / "step_00000004"), "--data", held_out, *known, *references[1], *out])
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["answers"]
    assert found == pytest.approx({name: last[f"validation_{name}"] for name in found}, rel=1e-5)
    assert found["margin"] > 0 and f"accuracy{found['accuracy']:29.4f}" in capsys.readouterr().out
