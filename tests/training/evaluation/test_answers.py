"""Answers judged by an objective: as the run's own validation judged them, from stored references to the last line."""

import json

import pytest

import train
from tests.runs import arguments, metrics, weights_of_another_shape
from training.evaluation import __main__ as evaluation
from training.logprobs import __main__ as logprobs


def write(path, count, letter):
    rows = [{"prompt": f"{letter}{i} is", "chosen": f" good {i}", "rejected": f" BAD{i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


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
