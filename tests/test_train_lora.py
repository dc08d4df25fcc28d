"""Runs with --lora: resumed, continued, opened by peft, merged, evaluated, and refused."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import profile_memory
import train
from kernels.lora import LORA
from model import Transformer
from tests.packages import needs
from tests.runs import arguments, losses, only_resume, saved_settings, weights_of_another_shape
from training.checkpoint import weights as weights_module
from training.checkpoint.weights import (
    find_weights,
    load_model_weights,
    shape_of_weights,
)
from training.evaluation import __main__ as evaluation
from training.export.__main__ import main as export_main
from training.families.decide import Source
from training.families.flags import LORA_TARGETS
from training.families.lora import Adapters, read_adapters, to_adapter_config
from training.generate import __main__ as generate
from training.host import errors
from training.host.errors import UserError, pip_install
from training.optim.quantized import quantize
from training.run.decide import adapters_found
from training.run.settings import TrainConfig

RANK = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(Path(train.__file__).read_text())
    return str(file)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return weights_of_another_shape(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def base_of_groups(tmp_path_factory):
    """Weights with rows of whole groups, as quantized weights need them."""
    return weights_of_another_shape(tmp_path_factory.mktemp("base"), intermediate_size=192)


@pytest.fixture(scope="module")
def run(base, corpus, tmp_path_factory):
    """A run of six steps with adapters of all projections."""
    output_dir = tmp_path_factory.mktemp("lora") / "run"
    assert train.main(lora_arguments(base, corpus, output_dir, steps=6)) == 0
    return output_dir


def lora_arguments(base, corpus, output_dir, *extra, steps):
    given = [
        "--init_from",
        str(base),
        "--lora",
        str(RANK),
        "--learning_rate",
        "0.01",
        "--checkpoint_interval",
        "3",
    ]
    return arguments(
        corpus, output_dir, *given, "--gradient_accumulation_steps", "2", *extra, steps=steps
    )


def adapters_in(folder):
    return load_file(folder / "adapter_model.safetensors")


def theirs(base, folder):
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder)


def ours(folder):
    """The decoder with the adapters of a folder beside its frozen weights."""
    model = Transformer(shape_of_weights(folder))
    read_adapters(folder)[0].prepare(model)
    entries = find_weights(folder, model.declared)
    model.load_state_dict(
        {name: weights_module._read_weight(entry) for name, entry in entries.items()}
    )
    return model


def edit_adapter_config(folder, **changes):
    content = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**content, **changes}))


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_adapters_and_their_state_alone(run, base):
    folder, last = run / "step_00000003", run / "step_00000006"
    names = {name.removeprefix("base_model.model.model.") for name in adapters_in(folder)}
    shape = shape_of_weights(base)
    assert names == Adapters(RANK, 2 * RANK).added(shape.parameters()).keys()
    assert not (folder / "model.safetensors").exists() and not equal(
        adapters_in(folder), adapters_in(last)
    )
    state = {name.rpartition(".")[0] for name in load_file(folder / "optimizer.safetensors")}
    assert state == names
    assert all(tensor.abs().max() > 0 for tensor in adapters_in(last).values())
    assert losses(run)[-1] < losses(run)[0]


def resumed(run, folder):
    """A copy of a run without its last checkpoint, resumed."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "step_00000006")
    assert train.main(only_resume(folder)) == 0
    assert losses(folder)[-3:] == losses(run)[-3:]
    assert equal(adapters_in(folder / "step_00000006"), adapters_in(run / "step_00000006"))
    return folder


def test_a_resumed_run_is_the_run_that_was_not_stopped(run, tmp_path):
    stopped = resumed(run, tmp_path / "run")
    assert saved_settings(stopped, 6)["lora"] == RANK
    states = [
        load_file(folder / "step_00000006/optimizer.safetensors") for folder in (stopped, run)
    ]
    assert equal(*states)


@pytest.fixture(scope="module")
def exact(base_of_groups, corpus, tmp_path_factory):
    """A run of six steps beside matrices that nothing rounds."""
    output_dir = tmp_path_factory.mktemp("exact") / "run"
    assert train.main(lora_arguments(base_of_groups, corpus, output_dir, steps=6)) == 0
    return output_dir


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("lora_bits", 4, marks=needs("bitsandbytes", "0.50")),
        ("linear", "fp8-all"),
    ],
)
def test_adapters_train_beside_rounded_matrices_and_resume(
    name, value, exact, base_of_groups, corpus, tmp_path, caplog
):
    """Checks a resumed run, another number of bits from there on, and the files as of any run."""
    caplog.set_level(logging.INFO)
    whole = tmp_path / "whole"
    assert (
        train.main(lora_arguments(base_of_groups, corpus, whole, f"--{name}", str(value), steps=6))
        == 0
    )
    stopped = resumed(whole, tmp_path / "stopped")
    assert saved_settings(stopped, 6)[name] == value
    # without a plan, too
    said = "linear maps: lora on fp8, head bf16; costs some loss, see docs/memory.md"
    assert caplog.messages.count(said) == 2 * (name == "linear")
    last, found = (adapters_in(folder / "step_00000006") for folder in (whole, exact))
    assert found.keys() == last.keys() and not equal(found, last)
    assert losses(whole) == pytest.approx(losses(exact), rel=0.01)
    if name == "lora_bits":
        assert train.main([*only_resume(stopped), "--lora_bits", "8", "--max_steps", "7"]) == 0
        assert "lora_bits: 4 -> 8" in caplog.messages


@needs("bitsandbytes", "0.50")
def test_adapters_are_added_to_the_weights_that_they_were_trained_beside(
    base_of_groups, corpus, tmp_path, caplog, capsys
):
    """Adapters of SmolLM2-135M that were trained beside 4 bits lost 0.087 nats on bf16."""
    caplog.set_level(logging.INFO)
    folder, exact = tmp_path / "run/step_00000002", tmp_path / "exact/step_00000002"
    assert (
        train.main(
            lora_arguments(base_of_groups, corpus, folder.parent, "--lora_bits", "4", steps=2)
        )
        == 0
    )
    shutil.copytree(folder, exact)
    (exact / "manifest.json").unlink()
    config = json.loads((exact / "config.json").read_text())
    (exact / "config.json").write_text(json.dumps(config | {"frozen_bits": 16}))
    shapes = shape_of_weights(folder).parameters()
    base, on_4_bits, on_bf16 = (
        dict(load_model_weights(each, shapes)) for each in (base_of_groups, folder, exact)
    )
    for name, weight in base.items():
        rounded = weight.bfloat16()
        if weight.ndim == 2 and name.startswith("layers."):
            quantize(weight.float().view(-1), 4).write_into(rounded)
            moved = on_bf16[name] - weight.float()  # B A
            torch.testing.assert_close(on_4_bits[name], rounded.float() + moved, rtol=0, atol=1e-6)
            assert not torch.equal(on_4_bits[name], on_bf16[name])
        else:
            assert torch.equal(on_4_bits[name], weight)
    # Runs that go on from them keep their bits, unless they are told otherwise.
    go_on = arguments(corpus, tmp_path / "on", "--init_from", str(folder), steps=1)
    assert train.main(go_on) == 0 and saved_settings(tmp_path / "on", 1)["lora_bits"] == 4
    assert f"adapters: lora_bits 4, as those of {folder} were trained" in caplog.messages
    assert profile_memory.main(["--init_from", str(folder), "--gpu", "H200"]) == 1
    targets = ",".join(LORA_TARGETS)
    given = f"--init_from {base_of_groups} --lora {RANK} --lora_targets {targets} --lora_bits 4\n"
    assert given in capsys.readouterr().err
    go_on = arguments(
        corpus, tmp_path / "other", "--init_from", str(folder), "--lora_bits", "16", steps=1
    )
    assert train.main(go_on) == 0 and saved_settings(tmp_path / "other", 1)["lora_bits"] == 16
    assert (
        "adapters: trained beside 4 bits per weight, and from here on beside 16" in caplog.messages
    )
    (exact / "config.json").write_text(json.dumps(config | {"frozen_bits": "4"}))
    with pytest.raises(UserError, match=r"config.json is damaged: frozen_bits '4' is none of"):
        load_model_weights(exact, shapes)


def test_peft_opens_a_checkpoint_and_computes_the_same(run, base):
    folder = run / "step_00000006"
    ids = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    expected = theirs(base, folder)(input_ids=ids).logits
    model = ours(folder)
    torch.testing.assert_close(
        model(ids, return_logits=True).logits, expected, rtol=1e-4, atol=1e-4
    )
    merged = Transformer(shape_of_weights(folder))
    merged.load_state_dict(dict(load_model_weights(folder, merged.config.parameters())))
    torch.testing.assert_close(
        merged(ids, return_logits=True).logits, expected, rtol=1e-4, atol=1e-4
    )
    assert model.layers[0].mlp.linear == LORA


def test_adapters_go_to_peft_and_back_bit_for_bit(run, base, corpus, tmp_path):
    folder = run / "step_00000006"
    theirs(base, folder).save_pretrained(tmp_path / "peft")
    assert equal(adapters_in(tmp_path / "peft"), adapters_in(folder))
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(config))
    assert (
        read_adapters(tmp_path / "peft")
        == read_adapters(folder)
        == (Adapters(RANK, 2.0 * RANK), base)
    )
    # A run that goes on from them starts where they are.
    found = []
    for source in (tmp_path / "peft", folder):
        output_dir = tmp_path / source.name / "run"
        extra = ["--init_from", str(source), "--learning_rate", "1e-12", "--weight_decay", "0"]
        assert train.main(arguments(corpus, output_dir, *extra, steps=2)) == 0
        assert saved_settings(output_dir, 2)["lora_alpha"] == 2 * RANK
        found.append(adapters_in(output_dir / "step_00000002"))
    assert equal(*found)
    for name, tensor in adapters_in(folder).items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "targets", ["all-linear", "full names", "ends of names", r".*\.(self_attn\.q|mlp\.down)_proj"]
)
def test_targets_are_read_as_peft_reads_them(targets, base, tmp_path):
    """Checks the names that are read and the names of the tensors that peft saved."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    full = [name for name, _ in model.named_modules() if name.endswith(("q_proj", "down_proj"))]
    given = {"full names": full, "ends of names": ["self_attn.q_proj", "down_proj"]}.get(
        targets, targets
    )
    lora = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=given, task_type="CAUSAL_LM")
    peft.get_peft_model(model, lora).save_pretrained(tmp_path)
    edit_adapter_config(tmp_path, base_model_name_or_path=str(base), target_modules=given)
    expected = LORA_TARGETS if targets == "all-linear" else ("q_proj", "down_proj")
    assert read_adapters(tmp_path) == (Adapters(RANK, 6.0, expected), base)
    found = {name.removeprefix("base_model.model.model.") for name in adapters_in(tmp_path)}
    assert found == {name for name, p in ours(tmp_path).named_parameters() if ".lora_" in name}


def test_targets_of_some_blocks_are_refused(base, run, corpus, tmp_path, capsys):
    """The names of block 0 alone could be all names of a model of one block; the tensors of the
    others are missed."""
    folder = tmp_path / "peft"
    theirs(base, run / "step_00000006").save_pretrained(folder)
    tensors = {n: t for n, t in adapters_in(folder).items() if ".layers.0.self_attn.q_proj." in n}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    names = ["model.layers.0.self_attn.q_proj"]
    edit_adapter_config(folder, base_model_name_or_path=str(base), target_modules=names)
    assert train.main(arguments(corpus, tmp_path / "run", "--init_from", str(folder))) == 1
    assert "layers.1.self_attn.q_proj.lora_A" in capsys.readouterr().err


def test_merged_weights_are_pefts(run, base, tmp_path):
    folder = run / "step_00000006"
    export_main([str(folder), str(tmp_path / "merged"), "--merge", "--dtype", "float32"])
    expected = dict(theirs(base, folder).merge_and_unload().named_parameters())
    found = load_file(tmp_path / "merged/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-6, atol=1e-6)


def test_a_folder_of_adapters_is_read_like_the_merged_one(run, corpus, tmp_path, capsys):
    folder, merged = run / "step_00000006", tmp_path / "merged"
    export_main([str(folder), str(merged), "--merge", "--dtype", "float32"])
    capsys.readouterr()
    written = []
    for source in (folder, merged):
        generate.main([str(source), "def main(", "--max_new_tokens", "20", "--device", "cpu"])
        written.append(capsys.readouterr().out)
        judged = tmp_path / "judged" / source.name
        data = ["--data", corpus, "--samples", "0", "--sequences", "2", "--context_length", "256"]
        assert evaluation.main(
            [str(source), *data, "--device", "cpu", "--output_dir", str(judged)]
        ) in (0, None)
        capsys.readouterr()
        found = json.loads((judged / "evaluation.json").read_text())
        written[-1] += json.dumps(found["loss_by_position"])
    assert written[0] == written[1] != ""


def test_lora_plus_multiplies_the_rate_of_b(base, corpus, tmp_path):
    """Checks the first step of AdamW, whose length is the learning rate."""
    lengths = {}
    for ratio in (1, 16):
        output_dir = tmp_path / str(ratio)
        extra = [
            "--lora_plus",
            str(ratio),
            "--weight_decay",
            "0",
            "--warmup_steps",
            "0",
            "--checkpoint_interval",
            "1",
        ]
        assert train.main(lora_arguments(base, corpus, output_dir, *extra, steps=2)) == 0
        found = adapters_in(output_dir / "step_00000001")
        lengths[ratio] = max(
            tensor.abs().max() for name, tensor in found.items() if "lora_B" in name
        )
    assert lengths[16] / lengths[1] == pytest.approx(16, rel=1e-3)


@pytest.mark.parametrize(("extra", "message"), [
    (["--tensor_parallel_size", "2"], "lora with tensor_parallel_size is not supported"),
    (["--lora_targets", "q_proj,lm_head"], "targets among q_proj, k_proj"),
    (["--lora_targets", "q_proj,q_proj"], "targets among q_proj, k_proj"),
    (["--lora_alpha", "0"], "lora_alpha must be"),
    (["--lora", "0"], "lora must be"),
    (["--lora_bits", "2"], "lora_bits: '2' is not one of 16, 8, 4"),
    (["--lora_bits", "4", "--compile"], "lora_bits 4 with compile is not supported"),
    (["--attention_type", "nsa"], "has no gates of it"),
    (["--rope_scaling", "yarn:4"], "export BASE OUT --rope_scaling yarn:4"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(extra, message, base, corpus, tmp_path, capsys):
    assert train.main(lora_arguments(base, corpus, tmp_path / "run", *extra, steps=2)) == 1
    assert message in capsys.readouterr().err


def test_quantized_weights_need_their_library(
    base_of_groups, corpus, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(errors, "find_spec", lambda package: None)
    assert (
        train.main(
            lora_arguments(base_of_groups, corpus, tmp_path / "run", "--lora_bits", "8", steps=2)
        )
        == 1
    )
    assert (
        f"lora_bits 8 needs the package bitsandbytes: {pip_install('bitsandbytes')}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["lora", "lora_alpha", "lora_targets", "lora_bits", "lora_plus"])
def test_flags_without_weights_to_adapt_are_refused(name, corpus, tmp_path, capsys):
    value = "q_proj" if name == "lora_targets" else "4"
    assert train.main(arguments(corpus, tmp_path / "run", f"--{name}", value)) == 1
    assert f"{name} has no effect without init_from" in capsys.readouterr().err


def test_one_command_starts_and_goes_on(base, corpus, tmp_path, capsys):
    """Checks --resume auto and --init_from with the targets in another order than theirs in a
    block."""
    flags = ["--lora_targets", "up_proj,q_proj", "--resume", "auto"]
    for steps in (2, 4, 4):
        assert train.main(lora_arguments(base, corpus, tmp_path / "run", *flags, steps=steps)) == 0
    assert saved_settings(tmp_path / "run", 4)["lora_targets"] == "q_proj,up_proj"
    further = [
        "--init_from",
        str(tmp_path / "run/step_00000004"),
        "--lora_targets",
        "up_proj,q_proj",
    ]
    assert train.main(arguments(corpus, tmp_path / "further", *further, steps=2)) == 0
    capsys.readouterr()
    assert (
        train.main(arguments(corpus, tmp_path / "every", *further[:-1], "all-linear", steps=2)) == 1
    )
    assert "lora_targets all-linear: the adapters of" in capsys.readouterr().err
    without = arguments(corpus, tmp_path / "other", "--lora", "4", "--resume", "auto")
    assert (
        train.main(without) == 1
        and "lora has no effect without init_from" in capsys.readouterr().err
    )
    resumed = only_resume(tmp_path / "run", "--max_steps", "9", "--lora_plus", "2")
    assert train.main(resumed) == 0 and saved_settings(tmp_path / "run", 9)["lora_plus"] == 2


def test_all_linear_is_every_projection_of_the_adapters_to_go_on_with(base, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(to_adapter_config(Adapters(4, 8.0), base))
    )
    asked = TrainConfig(init_from=str(tmp_path), lora_targets="all-linear")
    found = adapters_found(asked, ["lora_targets"], Source.read(tmp_path))
    assert found["lora_targets"] == ",".join(LORA_TARGETS)


def test_a_run_of_all_weights_takes_no_adapters(corpus, tmp_path, capsys):
    assert train.main(arguments(corpus, tmp_path / "run", steps=2)) == 0
    for name, value, message in (
        ("lora_plus", "2", "lora_plus has no effect without lora"),
        ("lora", "2", "was trained with no adapters, not Adapters(rank=2"),
    ):
        assert (
            train.main(only_resume(tmp_path / "run", "--max_steps", "9", f"--{name}", value)) == 1
        )
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lora_alpha", "lora_targets", "lora_plus"])
def test_flags_without_lora_are_refused(name, base, corpus, tmp_path, capsys):
    value = "q_proj" if name == "lora_targets" else "4"
    assert (
        train.main(
            arguments(corpus, tmp_path / "run", "--init_from", str(base), f"--{name}", value)
        )
        == 1
    )
    assert f"{name} has no effect without lora" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("lora", "2"), ("lora_alpha", "5"), ("lora_targets", "q_proj")]
)
def test_a_run_keeps_its_adapters(name, value, run, corpus, tmp_path, capsys):
    assert train.main([*only_resume(run), "--max_steps", "9", f"--{name}", value]) == 1
    assert "was trained with" in capsys.readouterr().err
    extra = ["--init_from", str(run / "step_00000006"), f"--{name}", value]
    assert train.main(arguments(corpus, tmp_path / "run", *extra)) == 1
    assert "or merge them first" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "message"), [
    ({"use_dora": True}, "has use_dora True, which this decoder does not compute"),
    ({"peft_type": "IA3"}, "has peft_type 'IA3', which"),
    ({"modules_to_save": ["lm_head"], "use_rslora": True}, "has modules_to_save ['lm_head'], "
                                                           "use_rslora True"),
    ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern"),
    ({"init_lora_weights": "pissa_niter_16"}, "has init_lora_weights 'pissa_niter_16'"),
    ({"init_lora_weights": "olora"}, "has init_lora_weights 'olora'"),
    ({"init_lora_weights": "corda"}, "has init_lora_weights 'corda'"),
    ({"alora_invocation_tokens": [1, 2]}, "has alora_invocation_tokens [1, 2]"),
    ({"use_qalora": True}, "has use_qalora True"),
    ({"layers_to_transform": 0}, "has layers_to_transform 0"),
    ({"task_type": "SEQ_CLS"}, "has task_type 'SEQ_CLS'"),
    ({"setting_of_tomorrow": 3}, "has setting_of_tomorrow 3"),
    ({"peft_type": None}, "has peft_type None"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "has target_modules"),
    ({"target_modules": "every-linear"}, "has target_modules"),
    ({"target_modules": "(q_proj"}, "has target_modules"),
    ({"target_modules": ["layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"]}, "has target_modules"),
    ({"target_modules": ["mlp.q_proj"]}, "has target_modules"),
    ({"r": "many"}, "is damaged, or not of peft"),
    ({"r": None}, "is damaged, or not of peft"),
    ({"r": float("inf")}, "r inf must be a whole number"),
    ({"r": 8.9}, "r 8.9 must be a whole number"),
    ({"r": True}, "r True must be a whole number"),
    ({"r": 10**30}, "r is 1000000000000000000000000000000; at most 65536 are built"),
    ({"r": 0}, "adapters need a rank and an alpha above 0"),
    ({"lora_alpha": float("nan")}, "adapters need a rank and an alpha above 0"),
    ({"lora_alpha": float("inf")}, "adapters need a rank and an alpha above 0"),
    ({"lora_alpha": 10**400}, "int too large to convert to float"),
    ({"lora_alpha": "16"}, "lora_alpha '16' a number"),
    ({"base_model_name_or_path": "Qwen/Qwen3-4B"}, "names 'Qwen/Qwen3-4B' as the folder of the "
                                                   "weights"),
    ({"base_model_name_or_path": 5000 * "a"}, "a' as the folder of the weights that were adapted, "
                                              "and it is not"),
    ({"base_model_name_or_path": None}, "base_model_name_or_path None a folder"),
    ({"base_model_name_or_path": "itself"}, "it holds adapters itself"),
])  # fmt: skip
def test_adapters_of_other_kinds_are_refused(changes, message, run, base, corpus, tmp_path, capsys):
    folder = tmp_path / "peft"
    theirs(base, run / "step_00000006").save_pretrained(folder)
    edit_adapter_config(folder, **{"base_model_name_or_path": str(base), **changes})
    if changes.get("base_model_name_or_path") == "itself":
        shutil.copy(base / "config.json", folder)
        edit_adapter_config(folder, base_model_name_or_path=str(folder))
    assert train.main(arguments(corpus, tmp_path / "run", "--init_from", str(folder))) == 1
    [error] = [
        line for line in capsys.readouterr().err.splitlines() if "adapter_config.json" in line
    ]
    assert message in error and len(error) < 1000


def test_a_folder_without_tensors_is_refused(run, corpus, tmp_path, capsys):
    folder = tmp_path / "adapters"
    folder.mkdir()
    shutil.copy(run / "step_00000006/adapter_config.json", folder)
    save_file({}, folder / "adapter_model.safetensors")
    assert train.main(arguments(corpus, tmp_path / "run", "--init_from", str(folder))) == 1
    assert (
        "it has no base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        in capsys.readouterr().err
    )


def test_dropout_of_a_folder_is_left_out_and_said(run, base, corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "peft"
    theirs(base, run / "step_00000006").save_pretrained(folder)
    edit_adapter_config(
        folder, base_model_name_or_path=str(base), lora_dropout=0.25, init_lora_weights="gaussian"
    )
    assert train.main(arguments(corpus, tmp_path / "run", "--init_from", str(folder), steps=2)) == 0
    assert "lora_dropout 0.25 of" in caplog.text


@pytest.mark.parametrize("damaged", ["adapters", "base"])
def test_damage_is_refused(damaged, run, base, corpus, tmp_path, capsys):
    """Checks that weights from which a run starts, or goes on, are compared with both manifests."""
    copied = tmp_path / "base"
    shutil.copytree(base, copied)
    assert train.main(lora_arguments(copied, corpus, tmp_path / "run", steps=2)) == 0
    folder = tmp_path / "run/step_00000002"
    file = (
        folder / "adapter_model.safetensors"
        if damaged == "adapters"
        else copied / "model.safetensors"
    )
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for argv in (
        arguments(corpus, tmp_path / "other", "--init_from", str(folder)),
        [*only_resume(tmp_path / "run"), "--max_steps", "9"],
    ):
        capsys.readouterr()
        assert train.main(argv) == 1
        assert f"{file.name} is corrupted" in capsys.readouterr().err


def test_adapters_of_a_base_that_was_trained_anew_are_refused(run, base, corpus, tmp_path, capsys):
    copied, adapted = tmp_path / "base", tmp_path / "run/step_00000002"
    shutil.copytree(base, copied)
    assert train.main(lora_arguments(copied, corpus, tmp_path / "run", steps=2)) == 0
    shutil.rmtree(copied)
    weights_of_another_shape(copied.parent / "anew", seed=2).rename(copied)
    resumed = [*only_resume(tmp_path / "run"), "--max_steps", "9"]
    continued = arguments(corpus, tmp_path / "other", "--init_from", str(adapted))
    judged = [
        "--data",
        corpus,
        "--samples",
        "0",
        "--sequences",
        "2",
        "--context_length",
        "256",
        "--device",
        "cpu",
    ]
    for command in (
        lambda: train.main(resumed),
        lambda: train.main(continued),
        lambda: generate.main([str(adapted), "def", "--device", "cpu"]),
        lambda: evaluation.main([str(adapted), *judged, "--output_dir", str(tmp_path / "judged")]),
        lambda: export_main([str(adapted), str(tmp_path / "merged"), "--merge"]),
    ):
        capsys.readouterr()
        assert command() == 1
        assert (
            f"in {copied} have changed" in (error := capsys.readouterr().err)
            and "with base_crc32" in error
        )
    # Adapters of peft's have no fingerprint to compare.
    for name in ("config.json", "manifest.json"):
        (adapted / name).unlink()
    assert train.main(continued) == 0


@pytest.mark.parametrize(
    "damaged",
    [
        {"lora_alpha": 7},
        {"r": 4},
        {"lora_dropout": 0.25},
        {"target_modules": ["q_proj"]},
        {"peft_type": "LOSA"},
        {},
    ],
    ids=str,
)
def test_resuming_passes_over_a_checkpoint_with_damaged_adapter_config(
    damaged, run, tmp_path, caplog
):
    """Checks a flipped bit of each setting, and of the base's place ({}), in the newest of two
    checkpoints."""
    stopped = tmp_path / "run"
    shutil.copytree(run, stopped)
    place = read_adapters(run / "step_00000006")[1]
    flipped = damaged or {
        "base_model_name_or_path": f"{str(place)[:-1]}{chr(ord(str(place)[-1]) ^ 1)}"
    }
    edit_adapter_config(stopped / "step_00000006", **flipped)
    assert train.main([*only_resume(stopped)[:-1], "--resume", "auto"]) == 0
    assert (
        f"passed over {stopped / 'step_00000006'}: " in caplog.text
        and losses(stopped)[-3:] == losses(run)[-3:]
    )
    assert equal(adapters_in(stopped / "step_00000006"), adapters_in(run / "step_00000006"))


def test_a_base_may_move(base, corpus, tmp_path, capsys):
    copied, moved, adapted = tmp_path / "base", tmp_path / "moved", tmp_path / "run/step_00000002"
    shutil.copytree(base, copied)
    assert train.main(lora_arguments(copied, corpus, tmp_path / "run", steps=2)) == 0
    copied.rename(moved)
    resumed = [*only_resume(tmp_path / "run"), "--max_steps", "4"]
    continued = arguments(corpus, tmp_path / "other", "--init_from", str(adapted))
    assert train.main(resumed) == 1 and f"names '{copied}'" in capsys.readouterr().err
    edit_adapter_config(adapted, base_model_name_or_path=str(moved), lora_alpha=12)
    for argv in (resumed, continued):
        assert train.main(argv) == 1
        assert (
            "'alpha': 6.0" in (error := capsys.readouterr().err)
            and "and now has {'rank': 3, 'alpha': 12.0" in error
        )
    edit_adapter_config(adapted, lora_alpha=6)
    for argv in (continued, resumed):
        assert train.main(argv) == 0
    generate.main([str(adapted), "def", "--max_new_tokens", "2", "--device", "cpu"])
    assert read_adapters(tmp_path / "run/step_00000004")[1] == moved


def test_a_profile_is_of_the_base(run, base, capsys):
    assert profile_memory.main(["--init_from", str(run / "step_00000006"), "--gpu", "24GB"]) == 1
    assert (
        f"holds adapters; give --init_from {base} --lora {RANK} --lora_targets "
        in capsys.readouterr().err
    )
    assert (
        profile_memory.main(
            ["--init_from", str(base), "--lora", "3", "--lora_targets", "q_proj", "--gpu", "24GB"]
        )
        == 0
    )
    assert "adapters               rank 3, in q_proj: " in capsys.readouterr().out


def test_exports_say_what_they_need(run, base, tmp_path, capsys):
    assert export_main([str(run / "step_00000006"), str(tmp_path / "out")]) == 1
    assert "--merge writes whole weights" in capsys.readouterr().err
    assert export_main([str(base), str(tmp_path / "out"), "--merge"]) == 1
    assert "--merge has no effect" in capsys.readouterr().err
