"""Opening a model: what is refused before its weights are read, how it attends, what it writes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from kernels.attention import NSA, Sparse
from kernels.attention.full import FULL
from model import MODEL_SIZES, Block, Transformer
from tests.checkpoints import save_checkpoint
from tests.shapes import reshape
from training.checkpoint import weights as weights_in_files
from training.evaluation import __main__ as evaluation
from training.export.__main__ import main as export_main
from training.families.config_json import to_config_json
from training.generate import __main__ as generate
from training.generate import inference
from training.generate.inference import (
    ModelFlags,
    load,
    memory_budget,
    mending_out_of_memory,
    open_folder,
    token_losses,
    write,
)
from training.host.errors import UserError
from training.host.files import write_file
from training.host.sizes import GIB
from training.logprobs import __main__ as logprobs
from training.parallel.fsdp import copy_weights, initial_weights
from training.parallel.world import World

CPU = torch.device("cpu")
WORLD = World(0, 1, CPU)
TINY = replace(MODEL_SIZES["tiny"], num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = Transformer(TINY)
    copy_weights(model, initial_weights(model, seed=0))
    state = {"settings": {"attention_type": "sparse", "selected_blocks": "2", "dense_below": 40}}
    return save_checkpoint(
        tmp_path_factory.mktemp("run"), 1, weights=model.state_dict(),
        model_config=to_config_json(TINY),
        optimizer_state=None, trainer_state=state,
    )  # fmt: skip


def test_attention_is_as_trained_unless_flags_say_otherwise(folder, tmp_path):
    opened = open_folder(ModelFlags(folder), WORLD)
    assert opened.kinds == (Sparse(2, dense_below=40),) * 2 and opened.stop_ids == {0}
    assert open_folder(ModelFlags(folder, attention_type="full"), WORLD).kinds == (FULL,) * 2
    flags = ModelFlags(folder, attention_type="sparse", selected_blocks="3,1", dense_below=7)
    assert [one.selected_blocks for one in open_folder(flags, WORLD).kinds] == [3, 1]
    for changed, message in (
        ({"attention_type": "nsa"}, "it has no gates of nsa"),
        (
            {"attention_type": "full", "selected_blocks": "3"},
            "selected_blocks has no effect with attention_type full",
        ),
        ({"selected_blocks": "1,2,3"}, "names 3 layers, the model has 2"),
    ):
        with pytest.raises(UserError, match=message):
            open_folder(ModelFlags(folder, **changed), WORLD)
    with pytest.raises(
        UserError, match=f"is the output_dir of a run; give a checkpoint in it, as {folder}"
    ):
        open_folder(ModelFlags(folder.parent), WORLD)
    content = json.loads((folder / "config.json").read_text())
    for name, value in (("hidden_size", "many"), ("model_type", "gpt2")):
        (tmp_path / "config.json").write_text(json.dumps({**content, name: value}))
        with pytest.raises(UserError, match="cannot take"):
            open_folder(ModelFlags(tmp_path), WORLD)


def test_weights_that_are_missing_or_of_another_size_are_refused_before_the_data_are_read(
    folder, tmp_path, capsys
):
    shutil.copytree(folder, made := tmp_path / "made")
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(content | {"intermediate_size": 48}))
    for message in ("has shape ", "has no model.safetensors"):
        for run, out in ((logprobs.main, [str(tmp_path / "out")]), (evaluation.main, [])):
            assert run([str(made), *out, "--data", "no data", "--device", "cpu"]) == 1
            assert message in capsys.readouterr().err
        (made / "model.safetensors").unlink(missing_ok=True)


def test_a_copy_of_a_tied_head_is_compared_once(folder, tmp_path, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    (text := tmp_path / "a.jsonl").write_text('{"text": "abc"}')
    compared, are_equal = [], weights_in_files._are_equal
    monkeypatch.setattr(
        weights_in_files, "_are_equal", lambda *pair: compared.append(pair) or are_equal(*pair)
    )
    for run, flags in (
        (generate.main, ["ab", "--max_new_tokens", "1"]),
        (logprobs.main, [str(tmp_path / "out"), "--data", str(text)]),
        (evaluation.main, ["--data", str(text), "--samples", "0"]),
    ):  # fmt: skip
        assert run([str(tmp_path), *flags, "--device", "cpu"]) == 0
        assert len(compared) == 1 and not compared.clear()


NOT_SETTINGS = [True, -3, 2.5, 10**400, float("nan"), [], [[]], {"a": 1}, "x", "", "a\nb", "\0"]


def test_an_edited_trainer_state_is_refused_in_one_line(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    states = [
        ("trainer", state)
        for state in ({"settings": 3}, {"settings": {}, "loader": []}, {"loader": None})
    ]
    plain = {"attention_type": "sparse", "selected_blocks": "2"}
    for name in ("attention_type", "selected_blocks", "dense_below"):
        states += [(name, {"settings": {**plain, name: value}}) for value in NOT_SETTINGS]
    for name, state in states:
        (tmp_path / "trainer.json").write_text(json.dumps({"trainer_state": state}))
        with pytest.raises(UserError, match=name):
            open_folder(ModelFlags(tmp_path), WORLD)


def test_what_does_not_fit_is_refused_before_the_weights_are_read(folder, monkeypatch):
    """The 4B's weights take 14.98 GiB in float32, keys and values of 131,072 tokens 36 GiB."""
    opened = replace(open_folder(ModelFlags(folder), WORLD), shape=MODEL_SIZES["4B"])
    monkeypatch.setattr(
        inference, "load_model_weights", lambda *_: pytest.fail("weights were looked for")
    )
    monkeypatch.setattr(inference, "available_host_bytes", lambda: 50 * GIB)
    message = (
        "weights take 14.98 GiB, keys and values of 131,072 tokens 36.00 GiB, 50.00 GiB are there: "
        "give shorter"
    )
    with pytest.raises(UserError, match=message):
        load(opened, 131_072, 131_072, WORLD, None)
    with pytest.raises(
        UserError, match=r"take 14.98 GiB, 14.00 GiB are there: give .* a larger --memory_budget"
    ):
        load(opened, 131_072, 0, WORLD, "14GB")
    gated = MODEL_SIZES["qwen3.5-4B"]  # 8 of its 32 layers have keys and values, of 4 heads of 256
    assert "131,072 tokens 8.00 GiB" in inference.check_memory(gated, 131_072, CPU, 2**40)
    with pytest.raises(
        UserError,
        match=r"memory_budget 51GB: 50.00 GiB of this machine's memory are free; lower it",
    ):
        memory_budget("51GB", CPU)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried.\nMore of it."), MemoryError(),
     RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried.")],
)  # fmt: skip
def test_memory_that_runs_out_is_one_line(error):
    with (
        pytest.raises(
            UserError,
            match=r"^[^\n]+\. Give shorter texts, fewer new tokens or a larger --memory_budget, or",
        ),
        mending_out_of_memory(),
    ):
        raise error
    with pytest.raises(RuntimeError, match="a defect"), mending_out_of_memory():
        raise RuntimeError("a defect")


@pytest.mark.gpu(gib=8)
def test_a_long_text_is_read_in_little_memory(folder):
    """Reading 131,072 tokens takes less than 4 GiB beside the weights; all logits would take 37 GiB
    in bf16."""
    world = World(0, 1, torch.device("cuda", 0))
    shape = replace(MODEL_SIZES["4B"], num_hidden_layers=2)
    with torch.device("meta"):
        names = Transformer(shape).state_dict()
    weights = (
        (name, torch.zeros(tensor.shape, dtype=torch.bfloat16)) for name, tensor in names.items()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "load_model_weights", lambda *_: weights)
        model = load(
            replace(open_folder(ModelFlags(folder), WORLD), shape=shape, kinds=(FULL,) * 2),
            131_072,
            0,
            world,
            None,
        )
    ids = torch.zeros(1, 131_072, dtype=torch.long, device=world.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        losses = token_losses(model, model(ids).hidden_states, ids)
    assert len(losses) == 131_072 and losses.isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < 4 * GIB


def test_a_loaded_model_writes_the_same_by_groups_of_heads(folder, monkeypatch):
    opened = open_folder(ModelFlags(folder), WORLD)
    model, ids = load(opened, 100, 120, WORLD, None), [int(i) for i in torch.arange(100) * 7 % 256]
    assert model.layers[0].self_attn.kind == opened.kinds[0] and not model.norm.weight.requires_grad
    written = [*write(model, ids, 20)]
    monkeypatch.setattr(inference, "LONG_TEXT", 100)
    by_heads = load(opened, 100, 120, WORLD, None)
    assert [block.self_attn.heads_at_a_time for block in (*model.layers, *by_heads.layers)] == [
        None,
        None,
        1,
        1,
    ]
    assert (
        [*write(by_heads, ids, 20)]
        == written
        == model.generate(torch.tensor([ids]), 20)[0, 100:].tolist()
    )
    stop = written[7]
    assert [*write(model, ids, 20, frozenset([stop]))] == written[: written.index(stop)]


def test_what_ends_an_answer_is_also_in_the_folders_configs(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for name in ("model.safetensors", "trainer.json"):
        shutil.copy(folder / name, tmp_path)
    write_file(tmp_path / "config.json", json.dumps({**config, "eos_token_id": 3}).encode())
    for content, more in (
        (b'{"eos_token_id": [7, 9]}', {7, 9}),
        (b'{"eos_token_id": 5}', {5}),
        (b"{}", set()),
    ):
        write_file(tmp_path / "generation_config.json", content)
        assert open_folder(ModelFlags(tmp_path), WORLD).stop_ids == {0, 3, *more}


def test_thousands_of_layers_are_refused_by_the_files_before_they_are_built(
    folder, tmp_path, monkeypatch, capsys
):
    """The weights have 2 layers, config.json says 4,096. Building those would take a minute."""
    mixed = reshape(TINY, num_hidden_layers=5, kinds=(FULL, NSA()), tie_word_embeddings=False)
    with torch.device("meta"):
        expected = [
            (name, parameter.shape) for name, parameter in Transformer(mixed).named_parameters()
        ]
    assert [(name, p.shape) for name, p in mixed.parameters().items()] == expected
    shutil.copytree(folder, tmp_path / "weights", ignore=shutil.ignore_patterns("manifest.json"))
    content = to_config_json(replace(TINY, num_hidden_layers=4096))
    (tmp_path / "weights" / "config.json").write_text(json.dumps(content))
    built, make = [], Block.__init__
    monkeypatch.setattr(Block, "__init__", lambda block, *sizes: built.append(make(block, *sizes)))
    weights, run = str(tmp_path / "weights"), str(tmp_path / "run")
    for main, argv in (
        (
            generate.main,
            [weights, "a", "--device", "cpu", "--tokenizer", "bytes", "--attention_type", "full"],
        ),
        (export_main, [weights, str(tmp_path / "out")]),
        (
            train.main,
            [
                "--init_from",
                weights,
                "--tokenizer",
                "bytes",
                "--device",
                "cpu",
                "--output_dir",
                run,
            ],
        ),
    ):
        assert main(argv) == 1
        error = capsys.readouterr().err
        assert "is of another size: it has no model.layers.2." in error and error.count("\n") == 1
    assert len(built) < 10
