"""A run and a step are decided once, and what cannot be is refused."""

from collections import Counter
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import train
from kernels.fp8 import FP8
from kernels.linear import PLAIN
from kernels.lora import LORA, LoRA
from kernels.mixed import Mixed
from model import MODEL_SIZES
from tests.runs import SPARSE, arguments, only_resume, weights_of_another_shape
from tests.shapes import reshape
from training.checkpoint import decide as checkpoint
from training.families.decide import decide_trained
from training.families.flags import DELTA_NET_TARGETS, LORA_TARGETS
from training.host.errors import UserError
from training.memory import decide as memory
from training.memory import kinds
from training.memory.decide import decide_memory_budget, decide_step
from training.optim.decide import check_lora_bits, state_format_of
from training.optim.flags import StateFlags
from training.parallel.world import World
from training.run import decide
from training.run.decide import recipe_of
from training.run.recipe import check_machine
from training.run.settings import TrainConfig


@pytest.mark.parametrize(("size", "given", "targets"), [
    ("tiny", None, LORA_TARGETS),
    ("tiny", "all-linear", LORA_TARGETS),
    ("tiny", "v_proj,q_proj", ("q_proj", "v_proj")),
    ("qwen3.5-0.8B", None, (*LORA_TARGETS, *DELTA_NET_TARGETS)),
])  # fmt: skip
def test_adapters_are_of_the_models_projections(size, given, targets):
    config = TrainConfig(lora=2, lora_targets=given)
    assert decide_trained(config, MODEL_SIZES[size]).targets == targets
    for unknown, message in (
        ("out_proj", "lora_targets out_proj: this model has"),
        ("", "targets among"),
    ):
        with pytest.raises(UserError, match=message):
            decide_trained(replace(config, lora_targets=unknown), MODEL_SIZES["tiny"])


def test_gated_delta_nets_are_not_compiled():
    decide_step(TrainConfig(), MODEL_SIZES["qwen3.5-0.8B"], 1)
    with pytest.raises(
        UserError, match="compile True is not supported: gated delta nets are not compiled; give"
    ):
        decide_step(TrainConfig(compile=True), MODEL_SIZES["qwen3.5-0.8B"], 1)


def test_a_run_is_decided_once(corpus, tmp_path, monkeypatch):
    """Texts of flags, the adapters' folder and the weights' headers are read once, whether a run
    starts or goes on."""
    counts: Counter[str] = Counter()

    def count(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, **k: counts.update([name]) or function(*a, **k)
        )

    for module, name in (
        (memory, "decide_trained"),
        (decide, "choose_model"),
        (decide, "find_weights"),
        (memory, "kinds_of"),
        (checkpoint, "parse_interval"),
        (decide, "open_tokenizer"),
        (kinds, "numbers_by_layer"),
    ):
        count(module, name)
    base, run = weights_of_another_shape(tmp_path / "base"), tmp_path / "run"
    flags = ["--init_from", str(base), "--lora", "2", "--lora_targets", "v_proj,q_proj", *SPARSE]
    flags += ["--selected_blocks", "4", "--validation_sequences", "2", "--checkpoint_interval", "1"]
    assert train.main(arguments(corpus, run, *flags, steps=2)) == 0
    assert len(counts) == 7 and {*counts.values()} == {1}
    counts.clear()
    assert train.main(only_resume(run, "--max_steps", "4")) == 0
    assert len(counts) == 7 and {*counts.values()} == {1}


def test_a_recipe_stays_as_it_is():
    made = recipe_of(TrainConfig(), MODEL_SIZES["tiny"], World(0, 1, torch.device("cpu")))
    with pytest.raises(FrozenInstanceError):
        made.memory_budget = "24GB"


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, "auto"),
    ({"memory_budget": "auto"}, "auto"),
    ({"memory_budget": "24GB", "host_budget": "84GB"}, "24GB"),
    ({"gradient_checkpointing": True}, None),
    ({"compile": True}, None),
])  # fmt: skip
def test_a_gpu_has_a_plan_unless_a_flag_replaces_it(settings, expected):
    assert decide_memory_budget(TrainConfig(**settings), torch.device("cuda")) == expected


def test_the_reference_kernels_have_no_plan(monkeypatch):
    """They take far more memory than any plan counts."""
    world, size = World(0, 1, torch.device("cuda")), MODEL_SIZES["tiny"]
    with pytest.raises(
        ValueError,
        match="kernels torch takes more memory than plans count; use auto, or --gradient",
    ):
        check_machine(recipe_of(TrainConfig(kernels="torch"), size, world), world)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = TrainConfig(kernels="torch", gradient_checkpointing=True, attention_backend="flash")
    check_machine(recipe_of(config, size, world), world)


def test_compact_state_is_refused_where_rows_are_no_groups():
    assert (
        state_format_of(StateFlags(optimizer_state="compact"), 1024, has_adapters=False)
        == "compact"
    )
    assert state_format_of(StateFlags(optimizer_state="auto"), 100, has_adapters=False) == "float32"
    assert state_format_of(StateFlags(optimizer_state="auto"), 1024, has_adapters=False) == "auto"
    assert state_format_of(StateFlags(optimizer_state="auto"), 1024, has_adapters=True) == "float32"
    with pytest.raises(
        ValueError,
        match="compact has no effect on rows of 100, which is no multiple of 32; drop it",
    ):
        state_format_of(StateFlags(optimizer_state="compact"), 100, has_adapters=False)


def test_quantized_weights_are_refused_where_they_cannot_be():
    check_lora_bits(4, MODEL_SIZES["0.6B"], num_gpus=1)
    check_lora_bits(16, MODEL_SIZES["0.6B"], num_gpus=2)
    with pytest.raises(
        ValueError,
        match="lora_bits 4 on 2 GPUs is not supported: FSDP2 shards bf16; give lora_bits 16",
    ):
        check_lora_bits(4, MODEL_SIZES["0.6B"], num_gpus=2)
    for name, value, found in (
        ("hidden_size", 100, r"layers\.0\.self_attn\.q_proj has 100 columns"),
        ("intermediate_size", 96, r"layers\.0\.mlp\.down_proj has 96 columns"),
        ("head_dim", 10, r"layers\.0\.self_attn\.o_proj has 160 columns"),
    ):
        narrow = reshape(MODEL_SIZES["0.6B"], **{name: value})
        with pytest.raises(
            ValueError,
            match=f"lora_bits 4 needs rows of whole groups of 64, and {found}; give lora_",
        ):
            check_lora_bits(4, narrow, num_gpus=1)


def test_fp8_is_refused_where_it_cannot_run(monkeypatch):
    size, cuda = MODEL_SIZES["0.6B"], torch.device("cuda")
    check = lambda size, **flags: decide_step(TrainConfig(**flags), size, 1).check_linear(cuda)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        ValueError, match=r"^linear fp8: FP8 needs compute capability 8.9 .*, cuda is older; use"
    ):
        check(size, linear="fp8")
    check(size)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check(size, linear="fp8-all")
    for linear in ("fp8", "fp8-all"):
        with pytest.raises(
            ValueError,
            match="multiples of 16 up to 32,768, number of rows of layer 0's gate_proj is 100",
        ):
            check(reshape(size, intermediate_size=100), linear=linear)
    check(reshape(size, intermediate_size=3_088), linear="fp8")
    with pytest.raises(
        ValueError, match="multiples of 16 up to 32,768, head_dim is 24; use linear bf16"
    ):
        check(reshape(size, head_dim=24), linear="fp8")


def test_a_forward_of_8_bits_differs_from_stored_log_probabilities(tmp_path, caplog):
    given = {
        "init_from": str(weights_of_another_shape(tmp_path)),
        "output_dir": str(tmp_path / "run"),
        "data": ["x"],
    }
    given |= {"objective": "dpo", "reference_logprobs": "y"}
    for linear, is_other in (("bf16", False), ("fp8", False), ("fp8-all", True)):
        caplog.clear()
        decide.decide({**given, "linear": linear}, World(0, 1, torch.device("cpu")))
        assert (f"this run's have linear {linear}, and differ" in caplog.text) == is_other


def test_copies_of_prompts_are_said(tmp_path, caplog):
    caplog.set_level("INFO")
    for objective, kind, is_said in (
        ("simpo", "sparse", True),
        ("simpo", "full", False),
        ("weighted", "nsa", False),
    ):
        caplog.clear()
        given = {"objective": objective, "attention_type": kind, "context_length": 16_384}
        given |= {"data": ["x"], "output_dir": str(tmp_path)}
        decide.decide(given, World(0, 1, torch.device("cpu")))
        assert (
            f"objective: layers of {kind} copy prompts before answers" in caplog.text
        ) == is_said
        assert ("copy" in caplog.text) == is_said


def test_linear_maps_are_of_the_flags():
    for flags, linear in (
        ({}, PLAIN), ({"linear": "fp8-all"}, FP8()),
        ({"linear": "fp8-all", "kernels": "torch"}, FP8("torch")),
        ({"linear": "fp8"}, Mixed(dx=FP8(), d_weight=FP8())),
        ({"lora": 4}, LORA), ({"lora": 4, "linear": "fp8-all"}, LoRA(FP8())),
    ):  # fmt: skip
        assert decide_step(TrainConfig(**flags), MODEL_SIZES["0.6B"], 1).linear == linear
