"""Refuses bad flags and files, 1,400 generated ones, in one line each, or accepts them; no hang, no
traceback."""

import copy
import json
import os
import signal
from dataclasses import fields

import pytest

import train
from model import MODEL_SIZES
from tests.runs import SMALL
from tests.training.data.test_tokenizer import write_tokenizer
from training.families.config_json import to_config_json
from training.run.settings import TrainConfig

VALUES = [
    "",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e400",
    "1e-400",
    "0x10",
    "9" * 400,
    "9" * 5000,
    "a" * 5000,
]
VALUES += ["/dev/null", "[]", "true", "None", "1,2", "../..", "é\n", "-"]
DEEP = 200_000
NOT_STRINGS = [None, True, 0, -3, 2.5, 10**30, [], [[]], {}, {"a": 1}, "x", ""]


class Accepted(Exception):
    """A run got as far as to build a model."""


@pytest.fixture
def outcome(tmp_path, monkeypatch, capsys):
    """A function that runs a command and returns the line that refuses it, or None. A hang is an
    error."""

    def build(*_, **__):
        raise Accepted

    monkeypatch.setattr(train, "build", build)
    monkeypatch.setattr(train, "show_batch", build)
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{argv} hangs"))
        signal.alarm(60)
        try:
            status = train.main([*argv, "--device", "cpu"] if "--device" not in argv else [*argv])
        except Accepted:
            return None
        finally:
            signal.alarm(0)
        error = capsys.readouterr().err.strip()
        assert status == 1 and error.startswith("error: ") and len(error) < 12_000, (argv, error)
        assert "\n" not in error or "\n" in "".join(argv), (argv, error)
        return error

    return run


def is_choice(field):
    return field.metadata["choices"] is not None or field.type is bool


def command(corpus, *extra):
    return ["--data", corpus, "--output_dir", "run", *SMALL, *extra]


def test_flags(outcome, corpus):
    """Tries every flag with every value. A boolean's value is a word too many; two values will do
    for choices."""
    count = refused = 0
    for field in fields(TrainConfig):
        for value in VALUES[:2] if is_choice(field) else VALUES:
            if not (
                field.name == "data" and value in ("../..", "/dev/null")
            ):  # a folder of the machine's
                count, refused = (
                    count + 1,
                    refused + (outcome(*command(corpus), f"--{field.name}={value}") is not None),
                )
    assert refused > 0.85 * count


def test_toml(outcome, corpus, tmp_path):
    file = tmp_path / "run.toml"
    for field in fields(TrainConfig):
        values = [
            '[""]',
            "true",
            '"x"',
            "[]",
            "{}",
            "-1",
            "nan",
            "1979-05-27",
            "[[1]]",
            '""',
            '"\\u0000"',
            "9" * 5000,
        ]
        for value in values[:3] if is_choice(field) else values:
            file.write_text(f"{field.name} = {value}\n")
            outcome("--config", str(file), *command(corpus))
    for content in (b"\xff", b"a = " + b"[" * DEEP, b"[" * DEEP, b"", b"\0"):
        file.write_bytes(content)
        assert outcome("--config", str(file), *command(corpus)) is not None, content[:9]
    file.write_bytes(b"\xef\xbb\xbfseed = 3")  # Windows' editors begin files so
    assert outcome("--config", str(file), *command(corpus)) is None
    file.write_text(f"learning_rate = {'9' * 400}")
    assert "must be between 1e-12 and 1.0" in outcome("--config", str(file), *command(corpus))
    file.write_text("data = []")
    assert outcome("--config", str(file), "--output_dir", "run") is not None


def mutations(content):
    """An object with each of its values, one at a time, replaced by values of other types."""
    for name, value in content.items():
        for other in NOT_STRINGS:
            if other != value:
                yield {**copy.deepcopy(content), name: other}


def test_files_of_weights(outcome, corpus, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    plain = to_config_json(MODEL_SIZES["tiny"])
    flags = command(corpus, "--init_from", str(folder), "--tokenizer", "bytes")
    for content in mutations(
        {**plain, "rope_scaling": 1, "rope_parameters": 2, "layer_types": 3, "sliding_window": 4}
    ):
        (folder / "config.json").write_text(json.dumps(content))
        assert outcome(*flags) is not None
    for text in ("[" * DEEP, "[]", "3", "", "\xff", '{"a":' * DEEP, "NaN"):
        (folder / "config.json").write_text(text, encoding="latin-1")
        assert outcome(*flags) is not None
    (folder / "config.json").write_text(json.dumps(plain))
    for content in (
        {"weight_map": value}
        for value in [*NOT_STRINGS, {"a": 1}, {"a": "\0"}, {"a": "b" * 5000}, {"a": "."}]
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        assert outcome(*flags) is not None
    os.mkfifo(folder / "pipe")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pipe"}}')
    assert "pipe is missing, truncated" in outcome(*flags)
    for content in (
        b"",
        b"\0" * 7,
        b"\xff" * 9,
        (2**60).to_bytes(8, "little"),
        b"\2" + b"\0" * 7 + b"{}",
        b"\0" * 100,
    ):
        (folder / "model.safetensors").write_bytes(content)
        assert outcome(*flags) is not None
    for text in (
        "[]",
        "[" * DEEP,
        '{"trainer_state": 1}',
        "",
        '{"trainer_state": {"tokenizer": []}}',
    ):
        (folder / "trainer.json").write_text(text)
        assert outcome(*command(corpus, "--init_from", str(folder))) is not None


def test_data(outcome, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    flags = "--output_dir", "run", *SMALL, "--data"
    lines = ["[" * DEEP, '{"text":' * DEEP, "{", "[]", "3", "null", "{}", "\0", ""]
    lines += [
        '{"text": 1}',
        '{"text": ""}',
        '{"text": "\\u0000"}',
        '{"text": "\\ud800"}',
        '{"prompt": "a"}',
    ]
    lines += [
        '{"prompt": 1, "completion": "b"}',
        '{"prompt": "a", "completion": []}',
        '{"completion": " "}',
    ]
    for i, line in enumerate(lines):
        (folder / f"{i}.jsonl").write_text(line)
        assert outcome(*flags, str(folder / f"{i}.jsonl")) is not None
    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt: it is no regular file; give --data" in outcome(
        *flags, str(tmp_path / "pipe.txt")
    )
    assert "pipe.txt: it is no regular file; give --config" in outcome(
        "--config", str(tmp_path / "pipe.txt")
    )
    for flag in ("--data", "--tokenizer", "--init_from", "--output_dir", "--config"):
        for path in (
            "a" * 5000,
            "a/" * 2500,
            str(tmp_path / "pipe.txt"),
            "",
            str(tmp_path / "data" / "0.jsonl" / "x"),
        ):
            assert (
                outcome(
                    "--output_dir", "run", "--data", str(folder / "0.jsonl"), *SMALL, flag, path
                )
                is not None
            )


def test_a_subfolder_that_cannot_be_read_is_named(outcome, corpus, tmp_path, monkeypatch):
    folder, scandir = tmp_path / "data", os.scandir
    (folder / "closed").mkdir(parents=True)
    (folder / "open.txt").write_text("text " * 1000)

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    error = outcome("--data", str(folder), "--output_dir", "run", *SMALL)
    assert f"cannot read {folder}/closed: Permission denied; make it readable" in error


def test_a_tokenizer_whose_unknown_token_is_not_in_its_vocabulary(outcome, corpus, tmp_path):
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    content = json.loads(file.read_text())
    words = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "[UNK]"}
    file.write_text(json.dumps({**content, "model": words}))
    assert "cannot encode" in outcome(*command(corpus), "--tokenizer", str(file))
    for mutation in mutations(content):
        file.write_text(json.dumps(mutation))
        outcome(*command(corpus), "--tokenizer", str(file))
