"""`python -m training.generate`: prompts from three places, what is refused, and text as it
grows."""

import io
import json
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.sampling import choose_tokens
from model import Transformer
from tests.checkpoints import save_checkpoint
from tests.training.data.test_tokenizer import write_tokenizer
from tests.training.generate.test_inference import TINY
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.evaluation import __main__ as evaluation
from training.families.config_json import to_config_json
from training.generate import __main__ as generate
from training.generate.__main__ import decoded, main
from training.logprobs import __main__ as logprobs
from training.parallel.fsdp import copy_weights, initial_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = Transformer(TINY)
    copy_weights(model, initial_weights(model, seed=0))
    return str(save_checkpoint(
        tmp_path_factory.mktemp("run"), 1, weights=model.state_dict(),
        model_config=to_config_json(TINY),
        optimizer_state=None, trainer_state={"settings": {}},
    ))  # fmt: skip


def test_prompts_from_argument_input_and_files(folder, tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO)
    flags = folder, "--device", "cpu", "--max_new_tokens", "4"
    assert main([*flags, "abc"]) == 0
    first = capsys.readouterr().out
    assert first.endswith("\n") and len(first) > 1 and "keys and values" in caplog.text
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"abc")))
    assert main([*flags]) == 0 and capsys.readouterr().out == first
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file, text in zip(
        files, ("\ufeffabc", "another prompt")
    ):  # a byte order mark is no part of a prompt
        file.write_text(text)
    assert generate.read_prompts(SimpleNamespace(prompt=None, file=files)) == [
        "abc",
        "another prompt",
    ]
    assert main([*flags, "--file", *map(str, files)]) == 0
    assert capsys.readouterr().out.startswith(f"==> {files[0]} <==\n{first}\n==> {files[1]} <==\n")
    sampled = []
    for seed in ("0", "0", "1"):
        assert main([*flags, "abc", "--temperature", "2", "--top_p", "0.9", "--seed", seed]) == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1] != sampled[2]


def test_texts_past_the_declared_context_are_warned_of(tmp_path, caplog):
    """Compares lengths of texts, not the context_length, with the declared context, before and
    after an extension."""
    config = replace(TINY, max_position_embeddings=64)
    model = Transformer(config)
    copy_weights(model, initial_weights(model, seed=0))
    state = {"weights": model.state_dict(), "model_config": to_config_json(config)}
    made = str(
        save_checkpoint(tmp_path, 1, **state, optimizer_state=None, trainer_state={"settings": {}})
    )
    files = {}
    for length in (40, 100):
        row = {"prompt": "a" * 20, "chosen": "b" * (length - 31), "rejected": "c" * 8}
        files[length] = tmp_path / f"{length}.jsonl"
        files[length].write_text(f"{json.dumps(row)}\n{json.dumps(row | {'prompt': 'x' * 20})}\n")
        (tmp_path / f"{length}.txt").write_text("a" * length)
    cpu = "--device", "cpu"
    for length, is_beyond in ((40, False), (100, True)):
        pairs = (
            "--data",
            str(files[length]),
            "--objective",
            "simpo",
            "--context_length",
            "128",
            *cpu,
        )
        text = (
            "--data",
            str(tmp_path / f"{length}.txt"),
            "--context_length",
            "128",
            "--short_context",
            "8",
        )
        for run, flags, cure in (
            (
                main,
                ["ab", "--max_new_tokens", str(length - 2), *cpu],
                "training.export --rope_scaling",
            ),
            (evaluation.main, [*text, "--samples", "0", *cpu], "training.export --rope_scaling"),
            (evaluation.main, pairs, "training.export --rope_scaling"),
            (logprobs.main, [str(tmp_path / f"out{length}"), *pairs], "--rope_scaling"),
        ):
            caplog.clear()
            assert run([made, *flags]) == 0
            said = (
                f"positions: texts of up to {length} tokens, and the weights declare a context of "
                f"64; {cure} yarn:2"
            )
            assert (said in caplog.text) == ("positions" in caplog.text) == is_beyond
    assert logprobs.main([made, str(tmp_path / "longer"), *pairs, "--rope_scaling", "yarn:2"]) == 0
    assert caplog.text.count("positions") == 1


@pytest.mark.parametrize(("flags", "message"), [
    (["abc", "--top_p", "0.5"], "top_p has no effect with temperature 0"),
    (["abc", "--temperature", "1", "--top_p", "0"], "top_p must be between 1e-12 and 1, got 0.0"),
    (["abc", "--temperature", "nan"], "temperature must be between 0 and 100"),
    (["abc", "--max_new_tokens", "0"], "max_new_tokens must be between 1 and"),
    (["abc", "--file", "x"], "both a prompt and --file"),
    (["ab\udcff"], "the prompt is not UTF-8: byte 0xff at offset 2"),
    (["abc", "--chat", "--system", "\udce9"], "--system is not UTF-8: byte 0xe9 at offset 0"),
    (["--file", "no/such"], "no/such"),
    ([""], "prompt is an empty string"),
    (["abc", "--memory_budget", "1MB"],
     "keys and values of 259 tokens 0.00 GiB, 0.00 GiB are there: give shorter texts"),
    (["abc", "--selected_blocks", "4"], "selected_blocks has no effect with attention_type full"),
    (["abc", "--top_k", "4"], "unknown flag --top_k"),
])  # fmt: skip
def test_bad_input_is_one_line(flags, message, folder, capsys):
    assert main([folder, "--device", "cpu", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(("given", "message"), [
    (None, "standard input is empty"),
    (SimpleNamespace(buffer=io.BytesIO(b"")), "standard input is empty"),
    (SimpleNamespace(buffer=io.BytesIO(b"a\xe9")), "standard input is not UTF-8: byte 0xe9 at "
                                                   "offset 1"),
    (SimpleNamespace(buffer=io.FileIO("/dev/null", "w")), "cannot read standard input"),
])  # fmt: skip
def test_standard_input_that_is_no_prompt(given, message, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", given)
    assert main([folder, "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_a_character_of_several_tokens_waits_for_its_last():
    text = "añ→b"
    pieces = [*decoded(list(text.encode()), ByteTokenizer())]
    assert pieces == ["a", "ñ", "→", "b", ""]
    assert (
        "".join(decoded(list(text.encode())[:-2], ByteTokenizer())) == "añ\N{REPLACEMENT CHARACTER}"
    )


def test_top_p_keeps_the_likeliest_tokens():
    """Probabilities are 0.5, 0.3, 0.15 and 0.05: the likeliest tokens are kept up to the one that
    reaches top_p."""
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(2000, 4)
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in (
        (0.4, {1}),
        (0.5, {1}),
        (0.7, {1, 3}),
        (0.9, {0, 1, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        chosen = choose_tokens(logits, 1.0, top_p, generator)
        assert chosen.shape == (2000, 1) and {*chosen.flatten().tolist()} == kept
    shares = (
        torch.bincount(choose_tokens(logits, 1.0, 0.7, generator).flatten(), minlength=4) / 2000
    )
    assert shares[1] == pytest.approx(0.5 / 0.8, abs=0.05)


def test_a_chat_is_framed_by_the_folders_template_or_the_command_says_how_to_give_one(
    tmp_path, monkeypatch, capsys
):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    torch.manual_seed(0)
    shape = replace(TINY, vocab_size=258)
    folder = save_checkpoint(
        tmp_path, 1, weights=Transformer(shape).state_dict(), model_config=to_config_json(shape),
        optimizer_state=None, trainer_state={"settings": {}},
    )  # fmt: skip
    write_tokenizer(folder / "tokenizer.json", special="<|im_end|>")
    (folder / "chat_template.jinja").write_text(template)
    asked = []
    monkeypatch.setattr(
        generate, "write", lambda model, ids, *_, **__: asked.append(ids) or iter(())
    )
    assert (
        generate.main([str(folder), "--device", "cpu", "--chat", "--system", "Be brief.", "Who?"])
        == 0
    )
    [ids] = asked
    text = load_tokenizer(str(folder)).decode(ids, with_special=True)
    assert text == "[system] Be brief.<|im_end|>[user] Who?<|im_end|>[assistant] "
    assert generate.main([str(folder), "--device", "cpu", "--system", "Be brief.", "Who?"]) == 1
    assert "system has no effect without --chat" in capsys.readouterr().err
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    data, cpu = ["--data", str(tmp_path / "a.jsonl")], ["--device", "cpu"]
    for source, message in (
        ("{{ messages }}", "and give it as {}"),
        ("", "add chat_template.jinja, or give {}"),
    ):
        (folder / "chat_template.jinja").write_text(source) if source else (
            folder / "chat_template.jinja"
        ).unlink()
        theirs = (
            "chat_template.jinja beside the tokenizer"
            if source
            else "--tokenizer a folder that has one"
        )
        for command, flags, cure in (
            (generate, ["--chat", "Who?"], theirs),
            (evaluation, [*data, "--samples", "0"], theirs),
            (logprobs, [str(tmp_path / "out"), *data], "--chat_template\n"),
        ):
            assert command.main([str(folder), *flags, *cpu]) == 1
            assert message.format(cure) in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named_first(tmp_path, monkeypatch, capsys):
    """Each command that opens a model says so before it reads standard input, or makes another
    folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    for command, words in (
        (generate, []), (generate, ["--file", "nosuch.txt"]), (evaluation, ["--beside", "x.json"]),
        (evaluation, ["--output_dir", "out"]), (logprobs, ["out", "--data", "x"]),
    ):  # fmt: skip
        assert command.main(["runs/nosuch", *words, "--device", "cpu"]) == 1
        assert capsys.readouterr().err.startswith(
            "error: runs/nosuch does not exist; give a checkpoint's step_ folder"
        )
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_may_have_an_added_token_more_than_the_model(tmp_path, monkeypatch, capsys):
    """Gemma 3's smallest has one for images. A prompt with it is refused, and so is a tokenizer
    with more words."""
    shape = replace(TINY, vocab_size=258)
    folder = save_checkpoint(
        tmp_path, 1, weights=Transformer(shape).state_dict(), model_config=to_config_json(shape),
        optimizer_state=None, trainer_state={"settings": {}},
    )  # fmt: skip
    write_tokenizer(folder / "tokenizer.json")  # 256 bytes, "he" and the end, then an image's
    (folder / "special_tokens_map.json").write_text('{"image_token": "<image>"}')
    assert load_tokenizer(str(folder)).vocab_size == 259
    words = write_tokenizer(tmp_path / "more.json", filler=2)
    monkeypatch.setattr(generate, "write", lambda model, ids, *_, **__: iter(()))
    flags = [str(folder), "--device", "cpu"]
    assert generate.main([*flags, "he"]) == 0
    capsys.readouterr()
    for given, message in [
        (["x<image>"], "prompt 'x<image>': token id 258 is not below the model's vocab_size 258"),
        (["he", "--tokenizer", words], "has ids up to 258, the model of"),
    ]:
        assert generate.main([*flags, *given]) == 1
        assert message in capsys.readouterr().err
    asked = ["--samples", "1", "--lengths", "1000", "--sequences", "0"]
    assert evaluation.main([*flags, *asked]) == 0
