"""Runs on chats: where what they save stops, and their sample."""

import contextlib
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

import train
from model import Transformer
from tests.runs import arguments
from tests.training.data.test_chat import CHATML, OLMO3
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.checkpoint.weights import Companions, read_companions
from training.data.chat import stop_ids
from training.data.tokenizer import load_tokenizer
from training.data.tokens import TokenStore
from training.run import sample
from training.run.sample import log_sample
from training.run.settings import TrainConfig

ENDS = {"<|endoftext|>": 257, "<|im_start|>": 258, "<|im_end|>": 259}


@pytest.fixture
def chats(tmp_path):
    talk = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "chats.jsonl").write_text(20 * (json.dumps({"messages": talk + talk}) + "\n"))
    return str(tmp_path / "chats.jsonl")


def with_tokenizer(folder, template=CHATML, stops=257):
    """Gives a folder a tokenizer of three special tokens, a chat template, and the ids at which its model stops."""
    write_tokenizer(folder / "tokenizer.json")
    tokens = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops, "top_p": 0.9}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(
    ("template", "given", "are_samples", "stops"),
    [
        (CHATML, 257, True, [257, 259]),  # a base model's
        (CHATML, [259, 257], True, [259, 257]),  # an instruct model's
        (OLMO3, None, True, [257, 259]),  # the last turn ends by another token
        (None, 3, True, [3, 257]),  # prompts with completions
        (CHATML, 257, False, 257),  # texts
    ],
)
def test_what_is_saved_stops_at_the_ends_that_are_trained(tmp_path, template, given, are_samples, stops):
    with_tokenizer(tmp_path, template, given)
    ids = stop_ids(load_tokenizer(str(tmp_path)), are_samples)
    for name, content in read_companions(tmp_path / "tokenizer.json").stopping_at(ids).files.items():
        (tmp_path / name).write_bytes(content)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert saved.eos_token_id == stops and saved.top_p == 0.9


def test_a_folder_without_a_generation_config_gets_one(tmp_path):
    with_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 257, "bos_token_id": 3}')
    companions = read_companions(tmp_path / "tokenizer.json")
    assert companions.stopping_at({257}) == companions
    content = json.loads(companions.stopping_at({257, 259}).files["generation_config.json"])
    assert content == {"bos_token_id": 3, "eos_token_id": [257, 259]}
    for damaged in (b"[1]", b"{", b"\xff"):
        with pytest.raises(ValueError, match=r"generation_config\.json beside the tokenizer is damaged: "):
            Companions({"generation_config.json": damaged}).stopping_at({1})


def test_a_template_whose_ends_are_unknown_is_said(tmp_path, caplog):
    for template, message in [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }} END {% endfor %}",
            "turns end with no token of their own",
        ),
        ("{% for m in messages %}", "is not told where turns end: chat template"),
    ]:
        with_tokenizer(tmp_path, template)
        assert stop_ids(load_tokenizer(str(tmp_path)), True) == {257} and message in caplog.text


def test_a_run_on_chats_saves_where_it_stops_and_shows_a_turn(released, chats, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    encode, asked = load_tokenizer(str(with_tokenizer(released))).encode, []

    def next_tokens(model, ids, count, **_):
        asked.append(ids[0].tolist())
        yield from (torch.tensor([[token]]) for token in (256, 259, 256))

    monkeypatch.setattr(Transformer, "next_tokens", next_tokens)
    run, flags = tmp_path / "run", ("--init_from", str(released), "--sample_tokens", "9", "--validation_sequences", "0")
    assert train.main(arguments(chats, run, *flags, steps=1)) == 0
    assert GenerationConfig.from_pretrained(run / "step_00000001").eos_token_id == [257, 259]
    prompt = "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [encode(prompt).tolist()]
    assert f"sample, after a held-out prompt:\n{prompt}<<<the prompt ends here>>>he" in caplog.messages


@pytest.mark.parametrize(
    ("row", "prompt", "stop"),
    [
        ({"prompt": "he said ", "completion": "x"}, "he said ", 257),
        ({"prompt": "x" * 1500, "completion": "y"}, "x" * 1024, 257),
        ({"text": "he is here. " * 99}, ("he is here. " * 99)[:77], 257),  # of 64 tokens
        ({"text": "he"}, "he", 257),
    ],
)
def test_a_sample_goes_on_from_a_document(tmp_path, monkeypatch, caplog, row, prompt, stop):
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(str(with_tokenizer(tmp_path)))
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    held_out, asked = TokenStore(load_documents(tmp_path / "a.jsonl", tokenizer, 300), 257), []

    def next_tokens(ids, count, **_):
        asked.append(ids[0].tolist())
        yield from (torch.tensor([[token]]) for token in (256, stop, 256))

    monkeypatch.setattr(sample, "products_in_bf16", lambda _: contextlib.nullcontext())
    world = SimpleNamespace(device=torch.device("cpu"), sum=lambda value: [value])
    log_sample(SimpleNamespace(
        held_out=held_out, tokenizer=tokenizer, optimizer=SimpleNamespace(homes={}), world=world,
        config=TrainConfig(sample_tokens=9), model=SimpleNamespace(next_tokens=next_tokens),
        stopping=SimpleNamespace(is_asked=lambda: False),
    ))  # fmt: skip
    assert asked == [tokenizer.encode(prompt).tolist()]
    assert caplog.messages[-1].endswith(f"{prompt}<<<the prompt ends here>>>he")
    assert ("the last 1,024 tokens of" in caplog.messages[-1]) == (len(prompt) == 1024)
