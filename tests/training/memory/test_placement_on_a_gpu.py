"""Placements on a GPU: the same gradients whatever stream is late, bytes as predicted, nothing
grows."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.attention.documents import find_documents
from kernels.head_loss import NextToken
from model import MODEL_SIZES, Transformer
from tests.gpu import free_memory
from tests.optimizers import make_optimizer
from tests.training.memory.test_placement import engine, send_home
from training.checkpoint.state import load_weights
from training.memory.cost_model import arena_bytes, fullest_stage
from training.memory.execution import WHOLE, Execution, Placement, inventory_of
from training.memory.placement import allocate, apply_execution
from training.memory.planner import make_plan
from training.memory.step import PackedDocuments, Step
from training.optim.adamw import MasterAdamW
from training.optim.inventory import NUM_SLOTS
from training.parallel.fsdp import initial_weights

pytestmark = pytest.mark.gpu
# A 0.6B with few layers and a small vocabulary
SMALL = replace(MODEL_SIZES["0.6B"], num_hidden_layers=6, vocab_size=1024)


def build_on_gpu(config, tokens, execution=None):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(config).to(torch.bfloat16)
    if execution is None:
        return model
    step = Step(config, model.named_parameters(), tokens)
    apply_execution(model, execution, arena_bytes(step, execution), send_home(model, execution))
    return model


def test_placements_agree_on_a_gpu():
    """Up to bfloat16's rounding, which differs with tiles and groups; a copy not waited for would
    be far off."""
    ids = torch.randint(
        1024, (1, 16_384), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    documents = find_documents((torch.arange(16_384)[None] > 9_000).long())

    def gradients(model):
        for tokens in (ids.flip(1), ids.roll(5), ids):
            model.zero_grad()
            loss = model(tokens, documents, NextToken.from_labels(tokens, documents)).loss
            loss.backward()
        return float(loss.detach()), {n: p.grad.float() for n, p in model.named_parameters()}

    expected_loss, expected = gradients(build_on_gpu(SMALL, 16_384))
    layers = SMALL.num_hidden_layers
    cases = {
        "gpu": (Placement("gpu", "gpu"),) * layers,
        "host": (Placement("host", "host"),) * layers,
        "pairs": (Placement("host", "host"), Placement("recompute", "host")) * (layers // 2),
        "weights": (Placement("host", "host", weights="host"),) * layers,
        "weights, pairs": (
            Placement("host", weights="host"),
            Placement("recompute", weights="host"),
        )
        * (layers // 2),
    }
    for name, placements in cases.items():
        for heads in (None, 1):
            loss, found = gradients(build_on_gpu(SMALL, 16_384, Execution(placements, 2048, heads)))
            assert loss == pytest.approx(expected_loss, rel=1e-3)
            for parameter, gradient in found.items():
                difference = (gradient - expected[parameter]).norm() / expected[parameter].norm()
                assert difference < 0.1, (name, heads, parameter, float(difference))


@pytest.mark.usefixtures("deterministic")
def test_whole_blocks_agree_with_placed_ones_on_a_gpu():
    """Bit for bit."""
    ids = torch.randint(
        1024, (1, 8192), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )

    def gradients(*placements):
        placements *= SMALL.num_hidden_layers // len(placements)
        model = build_on_gpu(SMALL, 8192, Execution(placements, attention_backend="flash"))
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])

    loss, expected = gradients(Placement())
    on_host = Placement("gpu", "gpu", weights="host")
    for placements in (
        [WHOLE],
        [Placement("host", "host"), WHOLE],
        [WHOLE, Placement("gpu", "gpu")],
        [WHOLE, on_host],
    ):
        placed_loss, found = gradients(*placements)
        assert torch.equal(placed_loss, loss) and torch.equal(found, expected)


@pytest.mark.gpu(gib=16)
def test_a_short_context_is_planned_whole_and_its_peak_is_as_predicted():
    config, tokens = MODEL_SIZES["0.6B"], 4096
    with torch.device("meta"):
        step = Step(config, Transformer(config).to(torch.bfloat16).named_parameters(), tokens)
    for gib, least, most in ((40, 28, 28), (12, 1, 27)):
        plan = make_plan(step, gib * 2**30, 8 * 2**30)
        assert least <= sum(p.is_whole for p in plan.execution.placements) <= most
        measured = measured_peak(config, tokens, plan.execution)
        assert measured == pytest.approx(plan.peak.bytes, rel=0.05), plan


def build_with_optimizer(config, tokens, execution, accumulate=True):
    """A model on the GPU whose weights are wherever the execution has them, and its optimizer."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    inventory = inventory_of(
        model.named_parameters(), model.declared, execution, accumulate=accumulate
    )
    allocate(model, inventory, torch.device("cuda"))
    optimizer = MasterAdamW(model.named_parameters(), inventory)
    load_weights(optimizer, initial_weights(model, seed=0))
    optimizer.update_beside_forward([model.embed_tokens, *model.layers, model.norm])
    step = Step(config, model.named_parameters(), tokens)
    apply_execution(model, execution, arena_bytes(step, execution), optimizer.homes)
    return model, optimizer


@pytest.mark.parametrize(
    ("state_format", "ends", "tied"),
    [
        ("float32", "gpu", True),
        ("compact", "gpu", True),
        ("float32", "host", False),
        ("compact", "host", True),
    ],
)
@pytest.mark.usefixtures("deterministic")
def test_visiting_weights_train_alike_on_a_gpu(state_format, ends, tied):
    """Bit for bit, whatever stream is late."""
    ids = torch.randint(
        1024, (1, 4096), device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )

    def train(weights, late=None):
        pair = Placement("host", "gpu", weights=weights), Placement("recompute", weights=weights)
        share = 0 if late == "update" else math.inf  # of the state of weights on the GPU
        placements = pair * (SMALL.num_hidden_layers // 2)
        execution = Execution(
            placements, state_format=state_format, gpu_state_bytes=share, loss_impl="chunked",
            ends=ends if weights == "host" else "gpu", attention_backend="flash",
        )  # fmt: skip
        model, optimizer = build_with_optimizer(
            replace(SMALL, tie_word_embeddings=tied), 4096, execution
        )
        visiting, losses = engine(model).weights, []
        fetch, update = visiting._fetch, optimizer._update

        def fetch_late(block):
            with torch.cuda.stream(
                visiting.to_gpu if late == "copies" else torch.cuda.current_stream()
            ):
                torch.cuda._sleep(20_000_000)  # longer than a block
            fetch(block)

        def update_late(*arguments):
            torch.cuda._sleep(20_000_000)
            update(*arguments)

        visiting._fetch = fetch_late if late in ("copies", "compute") else fetch
        optimizer._update = update_late if late == "update" else update
        for shift in range(4):
            for tokens in (ids.roll(shift), ids.flip(1)[:, : 1000 + shift]):
                loss = model(tokens, loss=NextToken.from_labels(tokens)).loss
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.clip_grad_norm(1.0)
            optimizer.step(1e-3)
            with torch.no_grad():  # right after the update
                losses.append(float(model(ids, loss=NextToken.from_labels(ids)).loss))
        return losses, torch.cat(
            [weight.detach().flatten().cpu().float() for weight in optimizer.weights().values()]
        )

    losses, expected = train("gpu")
    cases = (
        ("host", None),
        ("host", "copies"),
        ("host", "compute"),
        ("host", "update"),
        ("gpu", "update"),
    )
    for weights, late in cases:
        found_losses, found = train(weights, late)
        assert found_losses == losses and torch.equal(found, expected), (weights, late)


def test_weights_on_the_host_free_the_gpus_memory():
    """All but two blocks' weights leave the peak of a step, and a model is built within what
    stays."""
    config, tokens = replace(MODEL_SIZES["0.6B"], num_hidden_layers=12, vocab_size=1024), 2048

    def peaks(weights):
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        execution = Execution((Placement("gpu", weights=weights),) * 12, gpu_state_bytes=0)
        model, optimizer = build_with_optimizer(config, tokens, execution, accumulate=False)
        built = torch.cuda.max_memory_allocated() - before
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(config.vocab_size, (1, tokens), device="cuda")
            model(ids, loss=NextToken.from_labels(ids)).loss.backward()
            optimizer.step(1e-4)
        block = sum(parameter.nbytes for parameter in model.layers[0].parameters())
        return built, torch.cuda.max_memory_allocated() - before, block

    (built, peak, block), (built_there, peak_there, _) = peaks("host"), peaks("gpu")
    assert built_there - built == pytest.approx(12 * block, rel=0.1)
    slots = NUM_SLOTS * 2 * 2**23  # of weights, in the update
    assert (
        0.95 * (10 * block - slots) <= peak_there - peak <= 12 * block
    )  # an update needs no block's weights


@pytest.mark.parametrize("weights", ["gpu", "host"])
def test_nothing_grows_over_fifty_steps_on_a_gpu(weights):
    pair = (
        Placement("host", "host", weights=weights),
        Placement("recompute", "gpu", weights=weights),
    )
    placements = pair * (SMALL.num_hidden_layers // 2)
    execution = Execution(placements, 1024, heads_at_a_time=1, gpu_state_bytes=0)
    model, optimizer = build_with_optimizer(SMALL, 4096, execution)
    arena = engine(model).copies.arena
    ids = torch.randint(1024, (1, 4096), device="cuda")
    seen = []
    for _ in range(50):
        model(ids, loss=NextToken.from_labels(ids)).loss.backward()
        optimizer.step(1e-4)
        torch.cuda.synchronize()
        torch.empty(
            1, device="cuda"
        )  # the allocator now takes back what other streams have done with
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        seen.append(
            (
                torch.cuda.memory_allocated(),
                arena.used_bytes,
                torch.cuda.memory_reserved(),
                resident,
            )
        )
    assert seen[9][:2] == seen[-1][:2]
    assert seen[-1][2] <= 1.05 * seen[9][2] and seen[-1][3] - seen[9][3] < 32 * 2**20


@pytest.mark.gpu(gib=16)
@pytest.mark.parametrize("length", [32_768 - 1001, 2000])
@pytest.mark.parametrize("name", ["checkpointing", "attention kept", "all on the host"])
def test_peak_is_as_predicted(name, length):
    """Of a document of 1001 tokens and one of the rest, and of documents of 2000 tokens."""
    config, tokens = MODEL_SIZES["0.6B"], 32_768
    layers = config.num_hidden_layers
    execution = {
        "checkpointing": Execution((Placement(),) * layers),
        "attention kept": Execution((Placement("gpu", "gpu"),) * layers, 8192, gpu_state_bytes=0),
        "all on the host": Execution(
            (Placement("host", "host"),) * layers, 8192, 1, gpu_state_bytes=0
        ),
    }[name]
    execution = replace(execution, loss_impl="chunked")
    with torch.device("meta"):
        parameters = list(Transformer(config).to(torch.bfloat16).named_parameters())
    documents = PackedDocuments(length, ((length, tokens / length + 1),))
    predicted = fullest_stage(Step(config, parameters, tokens, documents=documents), execution)
    measured = measured_peak(
        config, tokens, execution, (torch.arange(tokens)[None] + length - 1001) // length
    )
    assert measured == pytest.approx(predicted.bytes, rel=0.05), predicted


def measured_peak(config, tokens, execution, documents=None):
    """Bytes of the second training step of a packed sequence."""
    free_memory()
    before = torch.cuda.memory_allocated()
    model = build_on_gpu(config, tokens, execution)
    optimizer = make_optimizer(
        model.named_parameters(), accumulate=False, gpu_state_bytes=execution.gpu_state_bytes
    )
    ids = torch.randint(config.vocab_size, (1, tokens), device="cuda")
    if documents is None:
        documents = (torch.arange(tokens)[None] > 1_000).long()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        packed = find_documents(documents)
        model(ids, packed, NextToken.from_labels(ids, packed)).loss.backward()
        optimizer.step(1e-4)
    return torch.cuda.max_memory_allocated() - before
