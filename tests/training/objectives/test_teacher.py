"""A teacher's likeliest words: stored by training.logprobs, and learnt from by --objective
distill."""

import json

import numpy as np
import pytest
import torch

import train
from model import Transformer
from tests.runs import arguments, losses, weights_of_another_shape
from training.checkpoint.weights import load_model_weights, shape_of_weights
from training.logprobs import __main__ as logprobs
from training.parallel.world import World
from training.run.decide import decide

K = 8


def test_a_student_learns_from_a_teacher_and_not_from_itself(tmp_path, capsys):
    teacher, student, wide = (
        str(weights_of_another_shape(tmp_path / str(i), i, num_hidden_layers=1, vocab_size=size))
        for i, size in ((1, 256), (2, 256), (3, 512))
    )
    rows = [{"prompt": f"{i}", "completion": " plus one is" * 3} for i in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = ["--objective", "distill", "--context_length", "64"]
    stored = {name: str(tmp_path / name) for name in ("teacher", "itself", "without", "wide")}
    for name, folder, top_k in (
        ("teacher", teacher, K), ("itself", student, K), ("without", student, None),
        ("wide", wide, K)
    ):  # fmt: skip
        own = ["--top_k", str(top_k)] if top_k else []
        logprobs.main(
            [
                folder,
                stored[name],
                *known,
                *own,
                "--data",
                str(tmp_path / "a.jsonl"),
                "--device",
                "cpu",
            ]
        )
    means = [line.split(" targets, ")[1] for line in capsys.readouterr().out.splitlines()]
    assert means[1] == means[2] != means[0]

    found = {}
    for name in ("teacher", "itself"):
        flags = [
            *known,
            "--init_from",
            student,
            "--teacher_logprobs",
            stored[name],
            "--learning_rate",
            "0.01",
        ]
        assert (
            train.main(
                [*arguments(str(tmp_path / "a.jsonl"), tmp_path / "run" / name, steps=5), *flags]
            )
            == 0
        )
        found[name] = losses(tmp_path / "run" / name)
    assert abs(found["itself"][0]) < 1e-5
    given = {
        "init_from": student,
        "objective": "distill",
        "data": ["x"],
        "output_dir": str(tmp_path / "none"),
    }
    assert (
        decide(
            {**given, "teacher_logprobs": stored["teacher"]}, World(0, 1, torch.device("cpu"))
        ).scoring.token_bytes
        == 16 + 28 * K
    )
    assert found["teacher"][0] > 1e-3 and found["teacher"][-1] < 0.8 * found["teacher"][0], found

    (tmp_path / "unread.jsonl").write_text("no JSON")
    for name, message in (
        ("without", "was made without --top_k"),
        ("wide", "the model has a vocab_size of 256; make"),
    ):
        flags = [*known, "--init_from", student, "--teacher_logprobs", stored[name]]
        data = str(
            tmp_path / ("unread.jsonl" if name == "without" else "a.jsonl")
        )  # refused before data are read
        assert train.main([*arguments(data, tmp_path / "refused"), *flags]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("k", [1, K])
def test_what_is_stored_are_the_likeliest_words(tmp_path, k):
    folder = weights_of_another_shape(tmp_path, num_hidden_layers=1)
    (tmp_path / "a.jsonl").write_text('{"text": "one and two"}\n')
    known = ["--objective", "distill", "--top_k", str(k), "--device", "cpu"]
    logprobs.main([str(folder), str(tmp_path / "out"), "--data", str(tmp_path / "a.jsonl"), *known])
    values = np.fromfile(tmp_path / "out" / "logprobs.f32", "<f4").reshape(12, 1 + 2 * k)
    shape = shape_of_weights(folder)
    model = Transformer(shape)
    model.load_state_dict(dict(load_model_weights(folder, shape.parameters())), strict=False)
    ids = torch.tensor([[*b"one and two", 0]])
    wanted, words = model(ids, return_logits=True).logits[0].log_softmax(-1).topk(k)
    assert (values[1:, 1 : 1 + k] == words[:-1].numpy()).all() and (values[0] == 0).all()
    np.testing.assert_allclose(values[1:, 1 + k :], wanted[:-1].detach().numpy(), rtol=1e-5)
