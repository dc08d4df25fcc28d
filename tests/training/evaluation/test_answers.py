"""Answers judged by an objective: as the run's own validation judged them, from stored references to the last line."""

import json
import math

import pytest

import train
from tests.runs import arguments, losses, metrics, weights_of_another_shape
from training.evaluation import __main__ as evaluation
from training.logprobs import __main__ as logprobs


def write(path, count, letter):
    rows = [{"prompt": f"{letter}{i} is", "chosen": f" good {i}", "rejected": f" BAD{i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_references_of_another_attention_or_rope_scaling_are_refused(tmp_path, capsys):
    """The same command with the run's own settings makes references with which the first loss is ln 2."""
    base, data = str(weights_of_another_shape(tmp_path, num_hidden_layers=1)), write(tmp_path / "data.jsonl", 9, "a")
    known, cpu = ["--objective", "dpo", "--context_length", "64"], ["--device", "cpu", "--data", data]
    for words, own in (
        ("factor=4.0", "--rope_scaling yarn:4"),
        ("8 tokens", "--attention_type sparse --dense_below 8"),
    ):
        for name, made_with in (("other", []), ("same", own.split())):
            if made_with or not (tmp_path / name).exists():
                assert logprobs.main([base, str(tmp_path / name), *known, *made_with, *cpu]) == 0
            run = ["--init_from", base, "--reference_logprobs", str(tmp_path / name), *known, *own.split()]
            assert train.main([*arguments(data, tmp_path / words / name, steps=1), *run]) == (name == "other")
        assert losses(tmp_path / words / "same")[0] == pytest.approx(math.log(2), abs=1e-6)
        refusal = capsys.readouterr().err
        assert "was made with attention everything before" in refusal and words in refusal


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_held_out_pairs_are_judged_as_by_the_run(tmp_path, capsys, objective):
    base = str(weights_of_another_shape(tmp_path, num_hidden_layers=1))
    data, held_out = write(tmp_path / "data.jsonl", 9, "a"), write(tmp_path / "held_out.jsonl", 5, "b")
    known, references = ["--objective", objective, "--context_length", "64"], [[], []]
    if objective == "dpo":
        for number, files in enumerate((["--data", data, "--validation_data", held_out], ["--data", held_out])):
            logprobs.main([base, str(tmp_path / f"of{number}"), *known, *files, "--device", "cpu"])
            references[number] = ["--reference_logprobs", str(tmp_path / f"of{number}")]
        targets = sum(len(f" good {i} BAD{i}") + 2 for i in range(5))
        assert f"of1: {targets} targets, " in capsys.readouterr().out
    run = tmp_path / "run"
    flags = arguments(data, run, "--init_from", base, "--validation_data", held_out, "--learning_rate", "0.01")
    train.main([*flags, *known, *references[0]])
    last = metrics(run)[-1]
    out = ["--output_dir", str(tmp_path / "out"), "--device", "cpu"]
    evaluation.main([str(run / "step_00000004"), "--data", held_out, *known, *references[1], *out])
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["answers"]
    assert found == pytest.approx({name: last[f"validation_{name}"] for name in found}, rel=1e-5)
    assert found["margin"] > 0 and f"accuracy{found['accuracy']:29.4f}" in capsys.readouterr().out
