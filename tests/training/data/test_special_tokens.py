"""Special tokens beside a tokenizer.json, compared with transformers' on the same folders."""

import json

import pytest
from transformers import AutoTokenizer

from tests.packages import needs
from tests.training.data.test_packing import load_documents
from tests.training.data.test_tokenizer import write_tokenizer
from training.data.chat import ChatTemplate
from training.data.special_tokens import EXTRA, NAMES
from training.data.tokenizer import load_tokenizer

TEXT = "he<s>  <|a|> <|b|>he <|x|>  </s> <|eot|><|endoftext|> <|q|> <|p|> <img>"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
MAP = {
    "bos_token": "<s>",
    "eos_token": {"content": "<|eot|>", **FLAGS},
    "additional_special_tokens": ["<|x|>", "<|a|>"],
}
DECODER = {
    "300": {"content": "<|q|>", "special": True, **FLAGS},
    "299": {"content": "<|p|>", "special": False, **FLAGS, "lstrip": True},
}


@pytest.mark.parametrize("files", [
    {"special_tokens_map.json": MAP},
    {"added_tokens.json": {"<|a|>": 260, "<|b|>": 259}},
    {"special_tokens_map.json": MAP, "added_tokens.json": {"<|b|>": 257, "<|a|>": 300}},
    {"special_tokens_map.json": {"extra_special_tokens": ["<|a|>"]}, "added_tokens.json": {"<|b|>": 258, "<|a|>": 7}},
    {"special_tokens_map.json": {"bos_token": "<|b|>"}, "added_tokens.json": {"<|b|>": 259, "</s>": 258}},
    {"special_tokens_map.json": MAP, "tokenizer_config.json": {"eos_token": "</s>", "pad_token": "<|p|>"}},
    {"special_tokens_map.json": MAP, "tokenizer_config.json": {"eos_token": "<|q|>", "added_tokens_decoder": {}}},
    {"special_tokens_map.json": MAP, "tokenizer_config.json": {"added_tokens_decoder": DECODER}},
    {"tokenizer_config.json": {"added_tokens_decoder": DECODER, "bos_token": "<s>", "eos_token": "<|p|>"}},
    {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "</s>", **FLAGS, "lstrip": True}}},
    {"tokenizer_config.json": {"image_token": "<img>", "extra_special_tokens": {"x_token": "<|x|>"}}},
    {"tokenizer_config.json": {"eos_token": "<|q|>", "extra_special_tokens": ["<|x|>", "he"]}},
    {"tokenizer_config.json": {"eos_token": None, "additional_special_tokens": ["<|q|>"]}},
    pytest.param(
        {
            "tokenizer_config.json": {
                "extra_special_tokens": {"x_token": "<|x|>"},
                "additional_special_tokens": ["<|q|>"],
            }
        },
        marks=needs("transformers", "5.24"),  # 5.17 adds no "<|q|>"
    ),
    {"tokenizer_config.json": {"extra_special_tokens": []}, "special_tokens_map.json": MAP},
    {"tokenizer_config.json": {"extra_special_tokens": {}}, "special_tokens_map.json": MAP},
    {"tokenizer_config.json": {"additional_special_tokens": ["<|q|>"]},
     "special_tokens_map.json": {"extra_special_tokens": ["<|x|>"]}},
    {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "<|q|>", **FLAGS}},
     "added_tokens.json": {"<|q|>": 259}},
])  # fmt: skip
def test_tokens_beside_the_file_are_as_in_transformers(tmp_path, files):
    write_tokenizer(tmp_path / "tokenizer.json")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    ids = ours.encode(TEXT).tolist()
    assert ids == theirs(TEXT, add_special_tokens=False, truncation=False, padding=False).input_ids
    named = {name: token for name, token in ours.special_tokens.items() if name in NAMES}
    assert {name: getattr(theirs, name) for name in NAMES if getattr(theirs, name)} == named
    assert ours.eos_id == (256 + 1 if theirs.eos_token is None else theirs.eos_token_id)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    added = ours._tokenizer.get_added_tokens_decoder(), theirs.added_tokens_decoder
    first, second = ({number: repr(token) for number, token in each.items()} for each in added)
    assert first == second
    assert ours.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True
    )  # special tokens are not shown


def test_a_template_knows_special_tokens_of_all_files(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "<|eot|>"})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ours = load_tokenizer(str(tmp_path))
    chat = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "x"}]
    ids, masked = ChatTemplate(ours).encode({"messages": chat})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ids.tolist() == theirs.apply_chat_template(chat, return_dict=False)
    assert ours.decode(ids[~masked], with_special=True) == " x<|eot|>"


def test_the_identity_is_of_the_file_and_the_tokens_beside_it(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    plain = load_tokenizer(path).identity
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(path).identity == plain
    config.write_text('{"eos_token": "<|eot|>"}')
    assert load_tokenizer(path).identity != plain


DAMAGED = (
    {"added_tokens_decoder": {"a": {}}},
    {"added_tokens_decoder": [1]},
    {"eos_token": 7},
    {EXTRA: [[]]},
)


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files_are_refused(tmp_path, content):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"special tokens of .* are damaged: .*; mend its JSON files"
    ):
        load_tokenizer(str(tmp_path))


def test_documents_end_where_the_folder_says(tmp_path):
    """Looks for eos_token, for the ids at which its model stops, and for the first token of a
    list."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "x", "completion": "he"}')
    for file, content, end in [
        ("added_tokens.json", {"<|eot|>": 258, "<|end|>": 259}, "<|endoftext|>"),
        ("config.json", {"eos_token_id": 258}, "<|eot|>"),
        ("generation_config.json", {"eos_token_id": [3, 259, 258]}, "<|end|>"),
        ("special_tokens_map.json", {"eos_token": "<|eot|>"}, "<|eot|>"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, "<|eot|>"),
        ("special_tokens_map.json", {}, "</s>"),
    ]:
        (tmp_path / file).write_text(json.dumps(content))
        tokenizer = load_tokenizer(path)
        assert tokenizer.eos_token == end == tokenizer.decode([tokenizer.eos_id], with_special=True)
        assert tokenizer.eos_id == tokenizer.encode(end)[0]
        [document] = load_documents(folder, tokenizer, 1000)
        assert not document.is_complete
