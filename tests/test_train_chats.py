"""Runs on chats: where what they save stops, and their sample."""

import contextlib
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, GenerationConfig

import train
from model import Transformer
from tests.runs import arguments
from tests.training.data.templates import CHATML, LLAMA3, OLMO3
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.checkpoint.weights import Companions, read_companions
from training.data.chat import ChatTemplate, open_tokenizer, stop_ids
from training.data.prepare import prepare
from training.data.sources import Document
from training.data.special_tokens import first_stop_id
from training.data.tokenizer import load_tokenizer
from training.data.tokens import TokenStore
from training.families.rows import token_ids
from training.generate.inference import _stop_ids
from training.host.errors import UserError
from training.run import running
from training.run.recipe import Start
from training.run.running import log_sample

TURN = (  # has the mark of an assistant's
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|eot_id|>{% endif %}"
)


@pytest.fixture
def chats(tmp_path):
    talk = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "chats.jsonl").write_text(20 * (json.dumps({"messages": talk + talk}) + "\n"))
    return str(tmp_path / "chats.jsonl")


def with_tokenizer(folder, template=CHATML, stops=257):
    """Gives a folder a tokenizer of three special tokens, a chat template, and the ids at which its
    model stops."""
    write_tokenizer(folder / "tokenizer.json")
    tokens = {
        "eos_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": stops, "top_p": 0.9, "_from_model_config": True})
    )
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
def test_what_is_saved_stops_at_the_ends_that_are_trained(
    tmp_path, template, given, are_samples, stops
):
    with_tokenizer(tmp_path, template, given)
    ids = stop_ids(load_tokenizer(str(tmp_path)), are_samples)
    for name, content in (
        read_companions(tmp_path / "tokenizer.json").stopping_at(ids).files.items()
    ):
        (tmp_path / name).write_bytes(content)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert saved.eos_token_id == stops and saved.top_p == 0.9
    assert stops == given or not saved._from_model_config


def test_a_folder_without_a_generation_config_gets_one(tmp_path):
    with_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    ids, wrapped = (
        {"eos_token_id": 257, "bos_token_id": 3},
        {"eos_token_id": None, "model_type": "qwen3_5"},
    )
    for config in (ids, {**wrapped, "text_config": ids}):  # a text model's, in the second
        (tmp_path / "config.json").write_text(json.dumps(config))
        companions = read_companions(tmp_path / "tokenizer.json")
        assert companions.stopping_at({257}) == companions
        content = json.loads(companions.stopping_at({257, 259}).files["generation_config.json"])
        assert content == {"bos_token_id": 3, "eos_token_id": [257, 259]}
        assert _stop_ids(tmp_path, SimpleNamespace(eos_id=5)) == {5, 257}
        assert first_stop_id(tmp_path, {257}) == 257
    assert token_ids({**wrapped, "text_config": 257}) == {}  # damaged
    for damaged in (b"[1]", b"{", b"\xff", b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":' * 3000):
        with pytest.raises(
            UserError, match=r"generation_config\.json beside the tokenizer is damaged: "
        ):
            Companions({"generation_config.json": damaged}).stopping_at({1})


def test_files_beside_a_tokenizer_of_another_name_go_along(tmp_path):
    """Its special tokens are read from them: without them the checkpoint's tokenizer would be
    another one."""
    with_tokenizer(tmp_path)
    given = Path(write_tokenizer(tmp_path / "mine.json", filler=1))
    (tmp_path / "saved").mkdir()
    for name, content in read_companions(given).files.items():
        (tmp_path / "saved" / name).write_bytes(content)
    assert load_tokenizer(str(tmp_path / "saved")).identity == load_tokenizer(str(given)).identity
    assert load_tokenizer(str(given)).encode("<|im_end|>").tolist() == [260]


@pytest.mark.parametrize(
    "template", [LLAMA3, LLAMA3.replace("{{ m.content | trim }}<|eot_id|>", TURN)]
)
@pytest.mark.parametrize("word", ["<|eot_id|>", "<s>"])
def test_a_chat_begins_and_ends_turns_once(tmp_path, template, word):
    """Templates that mark turns write what a message has as well as others."""
    write_tokenizer(tmp_path / "tokenizer.json")
    tokens = "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "extra_special_tokens": tokens})
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = ChatTemplate(load_tokenizer(str(tmp_path)))
    talk = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "x"}]
    assert chat.encode({"messages": talk})[0].tolist().count(257) == 0
    for i, content in ((0, word + "he"), (1, "x" + word)):
        with pytest.raises(ValueError, match=f"a message has '{re.escape(word)}' in it"):
            chat.encode({"messages": [*talk[:i], {**talk[i], "content": content}, *talk[i + 1 :]]})


def test_a_template_whose_ends_are_unknown_is_said(tmp_path, caplog):
    for template, message in [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} END {% endfor %}",
         "turns end with no token of their own"),
        ("{% for m in messages %}", "is not told where turns end: chat template"),
    ]:  # fmt: skip
        with_tokenizer(tmp_path, template)
        assert stop_ids(load_tokenizer(str(tmp_path)), True) == {257} and message in caplog.text


def test_a_run_on_chats_saves_where_it_stops_and_shows_a_turn(
    released, chats, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    encode, asked = load_tokenizer(str(with_tokenizer(released))).encode, []

    def next_tokens(model, ids, count, **_):
        asked.append(ids[0].tolist())
        yield from (torch.tensor([[token]]) for token in (256, 259, 256))

    monkeypatch.setattr(Transformer, "next_tokens", next_tokens)
    run, flags = (
        tmp_path / "run",
        ("--init_from", str(released), "--sample_tokens", "9", "--validation_sequences", "0"),
    )
    assert train.main(arguments(chats, run, *flags, steps=1)) == 0
    assert GenerationConfig.from_pretrained(run / "step_00000001").eos_token_id == [257, 259]
    prompt = "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [encode(prompt).tolist()]
    assert (
        f"sample, after a held-out prompt:\n{prompt}<<<the prompt ends here>>>he" in caplog.messages
    )


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
    asked, without_a_target = [], Document(np.uint32([257]), np.ones(1, bool), True)
    held_out = TokenStore(
        [without_a_target, *load_documents(tmp_path / "a.jsonl", tokenizer, 300)], 257
    )

    def next_tokens(ids, count, **_):
        asked.append(ids[0].tolist())
        yield from (torch.tensor([[token]]) for token in (256, stop, 256))

    monkeypatch.setattr(running, "products_in_bf16", lambda _: contextlib.nullcontext())
    world = SimpleNamespace(device=torch.device("cpu"), sum=lambda value: [value])
    log_sample(SimpleNamespace(
        held_out=held_out,
        recipe=SimpleNamespace(
            tokenizer=tokenizer, start=Start(), schedule=SimpleNamespace(sample_tokens=9)
        ),
        optimizer=SimpleNamespace(homes={}),
        world=world,
        model=SimpleNamespace(next_tokens=next_tokens),
        stopping=SimpleNamespace(is_asked=lambda: False), report=None,
    ))  # fmt: skip
    assert asked == [tokenizer.encode(prompt).tolist()]
    assert caplog.messages[-1].endswith(f"{prompt}<<<the prompt ends here>>>he")
    assert ("the last 1,024 tokens of" in caplog.messages[-1]) == (len(prompt) == 1024)


PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content }}{{ eos_token if m.role == "
    "'assistant' else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)
TURNS = PLAIN.replace("### ", "<|turn|>").replace("eos_token", "'<|over|>'")


def base_of(folder):
    """A released base model: no chat template, and ids of its vocabulary that no token has."""
    write_tokenizer(folder / "tokenizer.json")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    return folder


@pytest.mark.parametrize(("given", "added", "stops"), [
    ("chatml", ["<|im_start|>", "<|im_end|>"], [257, 259]),
    (TURNS, ["<|turn|>", "<|over|>"], [257, 259]),
    (PLAIN, [], 257),
])  # fmt: skip
def test_a_chat_template_is_given_to_a_base_model(tmp_path, chats, given, added, stops):
    """Tokens and mask are as if the folder had template and tokens, and what is saved has them for
    transformers."""
    folder, saved = base_of(tmp_path), tmp_path / "saved"
    template = tmp_path / "template.jinja"
    template.write_text(given)
    tokenizer = open_tokenizer(str(folder), "chatml" if given == "chatml" else str(template))
    assert tokenizer.added_for_chats == added and tokenizer.vocab_size == 258 + len(added)
    saved.mkdir()
    companions = read_companions(folder / "tokenizer.json").joined(
        Companions(tokenizer.changed_files())
    )
    for name, content in companions.stopping_at(stop_ids(tokenizer, True)).files.items():
        (saved / name).write_bytes(content)
    assert GenerationConfig.from_pretrained(saved).eos_token_id == stops
    ours, theirs = load_tokenizer(str(saved)), AutoTokenizer.from_pretrained(saved)
    assert ours.identity == tokenizer.identity and {*added} <= {*theirs.get_vocab()}
    record = json.loads(Path(chats).read_text().splitlines()[0])
    ids, masked = ChatTemplate(tokenizer).encode(record)
    assert ids.tolist() == theirs.apply_chat_template(record["messages"], return_dict=False)
    end = added[1] if added else "<|endoftext|>"
    assert tokenizer.decode(ids[~masked], with_special=True).replace(" ", "") == f"x{end}x{end}"
    assert [each.tolist() for each in ChatTemplate(ours).encode(record)] == [
        ids.tolist(),
        masked.tolist(),
    ]


def test_headers_of_all_roles_become_tokens(tmp_path):
    """The template makes them of the roles' names, and may refuse a system's message."""
    template, path = tmp_path / "template", write_tokenizer(tmp_path / "tokenizer.json")
    turns = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|endoftext|>' }}{% endfor "
        "%}"
    )
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    for before, roles in (("", ["assistant", "system", "user"]), (refusal, ["assistant", "user"])):
        template.write_text(before + turns)
        assert sorted(open_tokenizer(path, str(template)).added_for_chats) == [
            f"<|{role}|>" for role in roles
        ]


def test_chatml_begins_as_the_tokenizer_begins_texts(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="he $A", special_tokens=[("he", 256)]
    )
    tokenizer.save(path)
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    ids, _ = ChatTemplate(open_tokenizer(path, "chatml")).encode({"messages": chat})
    assert ids[:2].tolist() == [256, 258]


def test_a_run_with_a_chat_template_is_saved_with_it_and_resumed(
    released, chats, tmp_path, monkeypatch
):
    """The rows of its tokens are trained. A prepared set has the same tokens."""
    folder, run, template = base_of(released), tmp_path / "run", tmp_path / "template.jinja"
    template.write_text(TURNS)
    flags = (
        "--init_from",
        str(folder),
        "--chat_template",
        str(template),
        "--validation_sequences",
        "0",
    )
    assert train.main(arguments(chats, run, *flags, steps=1)) == 0
    before = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    after = load_file(run / "step_00000001" / "model.safetensors")["model.embed_tokens.weight"]
    assert (before[258:260] != after[258:260]).any(dim=1).all()
    template.unlink()  # the checkpoint has it
    assert train.main([*arguments(chats, run, "--resume", steps=2)]) == 0
    template.write_text(TURNS)
    made = prepare(Path(chats), tmp_path / "set", str(folder), chat_template=str(template))
    assert made["tokenizer"] == load_tokenizer(str(run / "step_00000002")).identity


@pytest.mark.parametrize(("given", "message"), [
    (["--chat_template", "{folder}/none"], "none: No such file or directory; give --chat_template "
                                           "a file of a"),
    (["--chat_template", "qwen3"], "is no file, and of names there is chatml alone; {folder} has "
                                   "no template: give "),
    (["--chat_template", "{{% for message in messages %}}"], "is a template's text; write it to a "
                                                             "file, and give that"),
    (["--chat_template", "{folder}"], "is a folder; give its chat_template.jinja, or --tokenizer "
                                      "{folder}"),
    ([], "chats need a chat template, for a base model --chat_template chatml, and {folder} has "
         "none: add chat"),
    (["--chat_template", "{folder}/wide"],
     "<|d4|> and 40 more, which {folder}/tokenizer.json lacks: the model's vocab"),
    (["--chat_template", "{folder}/bad"], "bad cannot be read: "),
    (["--chat_template", "{folder}/fails"], "fails fails: "),
    (["--chat_template", "chatml", "--lora", "4"], "adapters would not train their embeddings"),
    (["--chat_template", "chatml", "--tokenizer", "bytes"], "needs a tokenizer of words, not "
                                                            "bytes"),
    (["--chat_template", "chatml", "--data", "{folder}/a.txt"], "chat_template has no effect "
                                                                "without chats"),
])  # fmt: skip
def test_templates_that_cannot_be_trained_are_refused(
    released, chats, tmp_path, given, message, capsys
):
    folder = base_of(released)
    (folder / "wide").write_text("".join(f"<|d{i}|>" for i in range(43)) + TURNS)
    (folder / "bad").write_text("{% for %}")
    (folder / "fails").write_text("{{ raise_exception('no') }}")
    (folder / "a.txt").write_text("he " * 999)
    words = [word.format(folder=folder) for word in given]
    usual = arguments(chats, tmp_path / "run")[
        2 * ("--data" in words) :
    ]  # else data given twice are joined
    assert train.main([*usual, "--init_from", str(folder), *words]) == 1
    error = capsys.readouterr().err
    assert (
        message.format(folder=folder) in error
        and error.startswith("error: ")
        and error.count("\n") == 1
    )
