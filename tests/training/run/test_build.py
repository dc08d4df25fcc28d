"""Runs have a plan or none; a step that ran out of memory is explained."""

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file

import training.optim.formats
from kernels.attention import NSA, Window
from kernels.attention.full import FULL
from kernels.fp8 import FP8
from kernels.head_loss import NextToken
from kernels.linear import PLAIN
from kernels.lora import LoRA
from kernels.mixed import Mixed
from model import MODEL_SIZES, Transformer
from tests.ranks import run_ranks
from tests.shapes import reshape
from tests.storage_counter import StorageCounter
from training.checkpoint.weights import find_weights
from training.families.decide import Source
from training.memory.cost_model import pinned_bytes, step_seconds
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.machine import GPUS, H200, scale_rates
from training.memory.placement import apply_execution
from training.memory.plan import Plan
from training.memory.planner import find_max_context, make_plan
from training.memory.profiler import format_table
from training.memory.stages import Stages
from training.memory.step import PackedDocuments
from training.memory.timeline import timeline
from training.parallel.world import World
from training.run import build as run
from training.run.build import build_bench, model_on_meta, plan_memory, step_of, step_on_meta
from training.run.decide import recipe_of
from training.run.recipe import Start
from training.run.settings import TrainConfig

GIB = 2**30
CPU = torch.device("cpu")


def test_shared_sequences_have_a_plan_where_no_key_value_head_is_copied(pretended_gpu):
    world = World(0, 1, CPU)
    recipe = replace(
        recipe_of(TrainConfig(context_parallel_size=16), MODEL_SIZES["4B"], world),
        memory_budget="auto",
    )
    message = "no plan counts copies of 8 key/value heads on 16 ranks"
    with pytest.raises(
        ValueError, match=f"{message}; give --gradient_checkpointing, without --memory_budget"
    ):
        run.check_fits(recipe, world)
    text, _ = explain_out_of_memory(context_parallel_size=16, gradient_checkpointing=True)
    assert text == f"{message}; raise --context_parallel_size, or lower --context_length"
    text, plan = explain_out_of_memory(context_parallel_size=8, gradient_checkpointing=True)
    assert plan.step.tokens == 32_768 // 8 and text.startswith(
        "predicted for the step as it was placed"
    )


def test_fp8_has_kernels_bytes_seconds_and_a_line_of_the_plan():
    world = World(0, 1, CPU)
    config = TrainConfig(model_size="4B", context_length=32_768, linear="fp8-all", kernels="torch")
    recipe = recipe_of(config, MODEL_SIZES["4B"], world)
    step = step_of(recipe, model_on_meta(recipe.model, world), world, None)
    assert step.given.linear == FP8("torch")
    plans = {}
    for linear in (PLAIN, FP8()):
        step = step_on_meta(MODEL_SIZES["4B"], 32_768, given=replace(step.given, linear=linear))
        plans[linear] = make_plan(step, 24 * GIB, 102 * GIB)
    plain, fp8 = plans.values()
    assert 0.8 < fp8.seconds / plain.seconds < 0.95
    assert "linear maps            fp8, head bf16; costs some loss, see docs/memory.md" in str(fp8)
    assert "linear maps" not in str(plain)
    model = Transformer(MODEL_SIZES["tiny"])
    apply_execution(model, replace(fp8.execution, placements=(WHOLE,) * len(model.layers)))
    assert all(block.self_attn.linear == block.mlp.linear == FP8() for block in model.layers)
    assert model.linear == PLAIN


@dataclass(frozen=True)
class FP8WithHead(FP8):
    """FP8 for the head as well."""

    @property
    def head(self):
        return self


def test_blocks_maps_say_what_the_heads_is():
    step, plans = step_on_meta(MODEL_SIZES["4B"], 32_768), {}
    for linear in (FP8(), FP8WithHead(), LoRA(FP8WithHead())):
        plans[linear] = Plan(step, step.unplanned(Placement(), linear=linear), rates=H200)
    loss = {
        linear: timeline(plan.step, plan.execution, H200)[1].seconds
        for linear, plan in plans.items()
    }
    with_head, adapted = [*plans][1:]
    assert (
        loss[with_head]
        == loss[adapted]
        == pytest.approx(H200[PLAIN.rate] / H200[FP8.rate] * loss[FP8()])
    )
    assert re.search("linear maps +fp8, head fp8; costs some loss", str(plans[with_head]))
    model = Transformer(MODEL_SIZES["tiny"])
    ids = torch.randint(256, (1, 32))
    losses = [model(ids, loss=NextToken.from_labels(ids)).loss]
    for linear in (with_head, FP8()):
        apply_execution(model, Execution((WHOLE,) * len(model.layers), linear=linear))
        losses.append(model(ids, loss=NextToken.from_labels(ids)).loss)
    assert len({loss.item() for loss in losses}) == 3 and model.linear == PLAIN
    torch.testing.assert_close(torch.stack(losses[1:]), losses[0].expand(2), rtol=1e-2, atol=0)


def test_a_plan_counts_products_that_stay_in_bf16():
    step, fp8 = step_on_meta(MODEL_SIZES["4B"], 32_768), FP8("triton")
    every, gradients = Mixed(fp8, fp8, fp8), Mixed(dx=fp8, d_weight=fp8)
    plans = {
        linear: Plan(step, step.unplanned(WHOLE, linear=linear), rates=H200)
        for linear in (
            PLAIN,
            fp8,
            every,
            gradients,
        )
    }
    plain, alone, all_three, backward = (plan.seconds for plan in plans.values())
    assert alone == all_three
    # y is a third of the products, and would take two thirds of its time in FP8.
    timelines = [timeline(plan.step, plan.execution, H200) for plan in plans.values()]
    forward, backwards = ([phases[i].compute["products"] for phases in timelines] for i in (0, 2))
    assert forward[3] == forward[0] and backwards[3] == backwards[1] < backwards[0]
    assert alone < backward < plain
    # FP8 keeps inputs of products in 8 bits. MLPs keep gate and up in bf16 whatever their products
    # are.
    assert plans[fp8].peak.bytes < plans[PLAIN].peak.bytes
    text = "linear maps +y bf16, dx fp8, d_weight fp8, head bf16\n"
    assert re.search(text, str(plans[gradients]))


def test_kernels_are_also_the_optimizers(monkeypatch):
    """Kernels "torch" run no Triton in the update of compact state either."""
    config = TrainConfig(
        kernels="torch", optimizer_state="compact", gradient_checkpointing=True, context_length=64
    )
    seen, update = set(), training.optim.formats.compact_adamw
    record = lambda *tensors, **options: seen.add(options["impl"]) or update(*tensors, **options)  # noqa: E731
    monkeypatch.setattr(training.optim.formats, "compact_adamw", record)
    world, documents = World(0, 1, CPU), PackedDocuments.one_each(64, 1)
    shape = replace(MODEL_SIZES["tiny"], num_hidden_layers=1)
    model, optimizer, _ = run.build(recipe_of(config, shape, world), documents, world)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step(1e-3)
    assert seen == {"torch"}


@pytest.mark.parametrize("kinds", [(FULL,), (NSA(),), (Window(), FULL)])
def test_a_bench_has_the_steps_shape(kinds):
    """A bench has as many layers as the step's model, not as the size that a flag names."""
    shape = reshape(MODEL_SIZES["tiny"], num_hidden_layers=7, kinds=kinds)
    step = step_on_meta(shape, context_length=256)
    model = build_bench(step, step.given, World(0, 1, CPU)).model
    assert model.shard == step.shard == shape.shard(1) and len(model.layers) == 7
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def resident(model):
    """Bytes of each block's weights on the device."""
    return [sum(p.untyped_storage().nbytes() for p in block.parameters()) for block in model.layers]


MIXED = Placement(weights="host"), Placement(weights="gpu"), Placement("recompute", weights="host")


@pytest.mark.parametrize(("state_format", "ends"), [("float32", "gpu"), ("compact", "host")])
def test_a_bench_has_weights_where_they_are_placed(state_format, ends):
    """And steps like a bench with all weights on the GPU."""
    step = step_on_meta(replace(MODEL_SIZES["tiny"], num_hidden_layers=3), context_length=64)
    world, found = World(0, 1, CPU), []
    for placements in (MIXED, tuple(replace(placement, weights="gpu") for placement in MIXED)):
        execution = replace(
            step.given, placements=placements, state_format=state_format, loss_impl="chunked",
            ends=ends if placements is MIXED else "gpu",
        )  # fmt: skip
        bench = build_bench(step, execution, world)
        embedding = bench.model.embed_tokens.weight.untyped_storage()
        assert bool(embedding.nbytes()) == (execution.ends == "gpu")
        has_memory = [placement.weights == "gpu" for placement in placements]
        assert [bool(nbytes) for nbytes in resident(bench.model)] == has_memory
        with StorageCounter() as counter:
            measured = bench.measure(step, execution, counter)
        assert [bool(nbytes) for nbytes in resident(bench.model)] == has_memory
        assert measured.host_bytes >= 2 * sum(
            home.nbytes for home in bench.optimizer.homes.values()
        )
        found.append([weight.detach() for weight in bench.optimizer.weights().values()])
    assert all(weight.isfinite().all() for weight in found[0])
    # Each bench's step has tokens of its own.
    assert all((one - other).abs().max() < 1e-4 for one, other in zip(*found))


def test_a_run_starts_from_files_with_weights_on_the_host(monkeypatch, tmp_path):
    """Released weights go straight into their places."""
    shape, world = replace(MODEL_SIZES["tiny"], num_hidden_layers=3), World(0, 1, CPU)
    weights = {
        name: torch.randn_like(weight) for name, weight in Transformer(shape).state_dict().items()
    }
    save_file(
        {f"model.{name}": weight for name, weight in weights.items()},
        tmp_path / "model.safetensors",
    )

    def plan_memory(recipe, model, world, documents=None):
        step = step_of(recipe, model, world, documents)
        return Plan(
            step,
            replace(
                step.unplanned(Placement(), loss_impl="chunked", ends="host"), placements=MIXED
            ),
        )

    monkeypatch.setattr(run, "plan_memory", plan_memory)
    config = TrainConfig(context_length=64, init_from=str(tmp_path), optimizer_state="compact")
    found = find_weights(tmp_path, shape.parameters())
    recipe = recipe_of(config, shape, world, Start(source=Source.read(tmp_path), weights=found))
    model, optimizer, _ = run.build(recipe, PackedDocuments.one_each(64, 1), world)
    assert [bool(nbytes) for nbytes in resident(model)] == [False, True, False]
    found = optimizer.weights()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    ids = torch.arange(64)[None]
    with torch.no_grad():
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
        expected = Transformer(shape)
        expected.load_state_dict(weights)
        torch.testing.assert_close(loss, expected(ids, loss=NextToken.from_labels(ids)).loss)


def compare_with_a_prediction(world):
    """Compares this rank's step with a step of pretended GPUs; no rank has more of a parameter than
    the first."""
    shape = replace(MODEL_SIZES["tiny"], num_hidden_layers=3)
    sizes = {"context_parallel_size": world.context_size, "tensor_parallel_size": world.tensor_size}
    sizes["replicate"] = world.replicate
    config = TrainConfig(context_length=1000, batch_size=2, optimizer_state="float32", **sizes)
    recipe = recipe_of(config, shape, world)
    real = step_of(recipe, model_on_meta(shape, world), world, PackedDocuments.one_each(1000, 2))
    predicted = step_on_meta(shape, 1000, 2, given=real.given, num_gpus=world.size, **sizes)
    elements = [[row.numel for row in step.inventory(step.given)] for step in (real, predicted)]
    assert all(ours <= first for ours, first in zip(*elements, strict=True))
    if world.is_main:
        assert elements[0] == elements[1]
        for placement, gpu_state_bytes in (
            (Placement(), math.inf),
            (Placement("host", "host"), 1e6),
        ):
            execution = replace(
                real.given, placements=(placement,) * 3, gpu_state_bytes=gpu_state_bytes
            )
            assert list(Stages(real, execution)) == list(Stages(predicted, execution))
            assert pinned_bytes(real, execution) == pinned_bytes(predicted, execution)
            assert step_seconds(real, execution, H200) == step_seconds(predicted, execution, H200)


@pytest.mark.parametrize(
    ("num_ranks", "context", "tensor", "replicate"), [(3, 1, 1, 1), (4, 2, 1, 2), (4, 1, 2, 1)]
)
def test_the_step_of_gpus_that_are_not_there_is_that_of_ranks(
    num_ranks, context, tensor, replicate
):
    """Three ranks do not divide all parameters' rows."""
    sizes = {
        "context_parallel_size": context,
        "tensor_parallel_size": tensor,
        "replicate": replicate,
    }
    run_ranks(num_ranks, compare_with_a_prediction, **sizes)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU of 40 GiB, 2 of them taken by another process, and 60 GiB of host memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 35 * GIB)
    monkeypatch.setattr(run, "available_host_bytes", lambda: 60 * GIB)


def explain_out_of_memory(plan_budget=None, **settings):
    """Returns (the explanation for a 4B without a planned placement, or with one for `plan_budget`
    bytes; its plan)."""
    config, world = (
        TrainConfig(**{"context_length": 32_768, "batch_size": 1, **settings}),
        World(0, 1, CPU),
    )
    recipe = recipe_of(config, MODEL_SIZES["4B"], world)
    with torch.device("meta"):
        model = Transformer(recipe.model).to(torch.bfloat16)
    plan = plan_memory(recipe, model, world)
    if plan_budget is not None:
        recipe, plan = (
            replace(recipe, memory_budget="auto"),
            make_plan(plan.step, plan_budget, 60 * GIB),
        )
    return run.explain_out_of_memory(recipe, plan, torch.device("cuda")), plan


def plan_beside_flash_attn_4(monkeypatch, measured, version="4.0.0b36", **settings):
    """Returns the plan of a 4B of 12 layers on an H200.

    flash-attn-4 has `measured` times its assumed rates, or raises it.
    """

    def measure_attention(share, backend, device, context_length, kinds):
        if isinstance(measured, Exception):
            raise measured
        rates = scale_rates(GPUS["H200"], backend, kinds)
        return {name: measured * rate for name, rate in rates.items() if " " in name}

    monkeypatch.setattr(
        "training.memory.decide.choose_backend", lambda name, _: "cudnn" if name == "auto" else name
    )
    monkeypatch.setattr(run, "measure_attention", measure_attention)
    monkeypatch.setattr(run, "memory_budgets", lambda *_: (100 * GIB, 60 * GIB))
    monkeypatch.setattr(run, "cap_gpu_memory", lambda *_: None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"flash-attn-4": version}[name])
    config, world = TrainConfig(context_length=131_072, batch_size=1, **settings), World(0, 1, CPU)
    recipe = replace(
        recipe_of(config, replace(MODEL_SIZES["4B"], num_hidden_layers=12), world),
        memory_budget="auto",
    )
    with torch.device("meta"):
        model = Transformer(recipe.model).to(torch.bfloat16)
    return plan_memory(recipe, model, world, PackedDocuments.one_each(131_072, 1))


def test_a_plan_takes_the_faster_attention_kernel(monkeypatch, caplog):
    plan = plan_beside_flash_attn_4(monkeypatch, 1.0)
    cudnn, rival = plan.compared["cudnn"], plan.compared["flash-attn-4"]
    assert (
        plan.execution.attention_backend == "flash-attn-4" and plan.seconds == rival < 0.95 * cudnn
    )
    row = (
        f"attention kernel       flash-attn-4 (auto: a step takes cudnn {cudnn:.2f} s, "
        f"flash-attn-4 {rival:.2f} s)"
    )
    assert f"\n{row}\n" in str(plan)
    slower = plan_beside_flash_attn_4(monkeypatch, 0.5)
    assert (
        slower.execution.attention_backend == "cudnn"
        and slower.seconds == cudnn < slower.compared["flash-attn-4"]
    )
    asked = plan_beside_flash_attn_4(monkeypatch, 0.5, attention_backend="flash-attn-4")
    assert asked.execution.attention_backend == "flash-attn-4" and "attention kernel" not in str(
        asked
    )
    assert not caplog.records


def test_attention_is_cudnns_where_flash_attn_4_cannot_be_compared(monkeypatch, caplog):
    for measured, version, message in (
        (
            1.0,
            "4.0.0b99",
            r"4\.0\.0b99 is not among the tested versions \(4\.0\.0b36\): attention is cuDNN's",
        ),
        (
            ImportError("no cutlass"),
            "4.0.0b36",
            "attention is cuDNN's: flash-attn-4 4.0.0b36 fails here: no cutlass",
        ),
    ):
        caplog.clear()
        plan = plan_beside_flash_attn_4(monkeypatch, measured, version)
        assert plan.execution.attention_backend == "cudnn" and not plan.compared
        assert re.search(message, caplog.text)


@pytest.mark.parametrize(("settings", "advice", "gib"), [
    *(({flag: True},
       "37.00 GiB; --gradient_checkpointing and --compile dropped make such a plan; its seconds "
       "are an H200's", 37)
      for flag in ("gradient_checkpointing", "compile")),
    ({"plan_budget": 20 * GIB, "optimizer_state": "float32"},
     "18.00 GiB; --memory_budget 18.0GB makes such a plan", 18),
])  # fmt: skip
def test_out_of_memory_names_a_plan_that_fits(settings, advice, gib, pretended_gpu):
    text, plan = explain_out_of_memory(**settings)
    if gib == 37:
        placement = Placement() if "gradient_checkpointing" in settings else WHOLE
        assert plan.execution.placements == (placement,) * 36
    else:
        assert "\nforward of layers " in text  # equal layers share a row
    table, fits = (
        format_table(list(Stages(plan.step, plan.execution))),
        make_plan(plan.step, gib * GIB, 60 * GIB),
    )
    assert (
        text == f"predicted for the step as it was placed:\n{table}\npredicted to fit into "
        f"{advice}:\n{fits}"
    )


def test_out_of_memory_where_no_plan_fits_names_the_largest_context(pretended_gpu):
    text, plan = explain_out_of_memory(context_length=1_048_576, gradient_checkpointing=True)
    assert text.endswith(
        f"; the largest that does is {find_max_context(plan.step, 37 * GIB, 60 * GIB)}"
    )
