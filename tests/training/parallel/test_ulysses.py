"""Ranks that share sequences equal one process: the exchange, loss and every gradient, and runs
that resume."""

import functools
import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from kernels.attention import NSA, Sparse, Window
from kernels.attention.full import FULL
from kernels.context import Context, Rotations
from kernels.experts.part import ExpertsPart
from kernels.gated_delta_net import DeltaNet
from kernels.head_exchange import HeadExchange, RanksOnMeta
from kernels.parts import AttentionKind
from kernels.rope import YarnScaling
from model import MODEL_SIZES, Attention, Transformer
from tests.ranks import run_ranks
from tests.runs import arguments, losses, metrics, only_resume, weights, weights_of_another_shape
from tests.shapes import model_of
from tests.storage_counter import StorageCounter
from tests.training.data.test_packing import make_loader
from training.data.sources import Document
from training.families.config_json import in_family
from training.host.errors import UserError
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.placement import apply_execution
from training.parallel.fsdp import copy_weights, initial_weights, shard_model
from training.parallel.tensor import share_matrices
from training.parallel.ulysses import check_sharing, share_sequences
from training.parallel.world import World, make_mesh
from training.run.train_step import run_model

ROOT = Path(__file__).parents[3]
SEQUENCES = 4  # sequences per step, over all ranks
STEADY = [
    "--context_length",
    "65",
    "--learning_rate",
    "1e-3",
    "--final_learning_rate_ratio",
    "1",
    "--warmup_steps",
]
STEADY += [
    "0",
    "--validation_sequences",
    "3",
]  # the learning rate does not depend on the number of steps


class Case(NamedTuple):
    """A small model, its data and its execution: H query and G key/value heads of width K,
    sequences of T tokens.

    `lengths` are the documents' tokens, `placements` belong to the two layers.
    """

    H: int
    G: int
    T: int
    lengths: tuple[int, ...]
    placements: tuple[Placement, Placement]
    loss_impl: str = "auto"
    kinds: tuple[AttentionKind, ...] = ()  # of the two layers; (): full
    dtype: torch.dtype = torch.float32
    heads_at_a_time: int | None = None
    K: int = 32
    mlp_tile_size: int | None = None
    tied: bool = True
    model_type: str = "qwen3"  # decides about biases and norms of heads
    experts: tuple[ExpertsPart, ...] = ()  # of both layers


PACKED, ONE = (50, 7, 120, 33, 64, 9, 90, 21), (700,)
HOST = Placement("host", "host")
SPARSE, NATIVE = (Sparse(1, 32, 64, 65),) * 2, (NSA(4, 64),) * 2
DELTA = DeltaNet(4, 8, 16, 16)
QWEN35 = {
    "num_hidden_layers": 2, "kinds": (DELTA, FULL), "model_type": "qwen3_5_text",
    "offset": 1.0, "cast": False, "has_output_gate": True,
    "rotary_dim": 8,
}  # fmt: skip
QWEN2, LLAMA = (
    {"model_type": "qwen2"},
    {"model_type": "llama"},
)  # biases without norms of heads; neither
CASES = {
    "dense, packed": Case(8, 2, 64, PACKED, (WHOLE, WHOLE), "chunked"),
    "one document of odd length": Case(8, 2, 67, ONE, (Placement(), Placement()), "standard"),
    "groups that ranks divide unevenly": Case(
        12, 6, 64, PACKED, (HOST, Placement("recompute")), "chunked", **QWEN2
    ),
    "sparse": Case(
        8,
        4,
        256,
        (150, 300, 41),
        (Placement("gpu", "gpu"), HOST),
        "standard",
        SPARSE,
        **LLAMA,
    ),
    "nsa": Case(
        8, 4, 321, (1200, 300, 77, 400), (WHOLE, Placement("gpu", "host")), "chunked", NATIVE
    ),
    "dense, one head at a time": Case(
        8, 4, 67, ONE, (Placement(), Placement("gpu", "gpu")), heads_at_a_time=1
    ),
    "dense, packed, two heads": Case(
        8, 8, 64, PACKED, (HOST, Placement("recompute")), heads_at_a_time=2, **QWEN2
    ),
    "sparse, one head": Case(
        8,
        4,
        256,
        (150, 300, 41),
        (Placement(), HOST),
        "standard",
        SPARSE,
        heads_at_a_time=1,
        **QWEN2,
    ),
    "nsa, one head": Case(
        8,
        4,
        321,
        (1200, 300, 77),
        (Placement(), Placement("gpu", "host")),
        "chunked",
        NATIVE,
        heads_at_a_time=1,
        **LLAMA,
    ),
    "window, full": Case(8, 2, 160, (300, 41, 150), (HOST, WHOLE), "chunked", (Window(50), FULL)),
    "sparse, window, one head": Case(
        8,
        4,
        256,
        (150, 300, 41),
        (HOST, Placement("gpu", "gpu")),
        "standard",
        (*SPARSE[:1], Window(64)),
        heads_at_a_time=1,
    ),
    "gemma3, one head": Case(
        8,
        4,
        160,
        (300, 41, 150),
        (HOST, Placement("recompute")),
        "chunked",
        (Window(64), FULL),
        heads_at_a_time=1,
        mlp_tile_size=16,
        model_type="gemma3_text",
    ),
    "olmo3": Case(
        8, 4, 160, (300, 41, 150), (HOST, WHOLE), "standard", (Window(64), FULL), model_type="olmo3"
    ),
    "ministral3": Case(8, 2, 160, (300, 41, 150), (WHOLE, HOST), model_type="ministral3"),
    "bfloat16": Case(8, 2, 64, PACKED, (Placement(), WHOLE), "chunked", dtype=torch.bfloat16),
    "delta net, full": Case(
        8, 4, 67, PACKED, (HOST, Placement("recompute")), "chunked", (DELTA, FULL)
    ),
    "delta nets of one document": Case(
        8, 4, 160, ONE, (Placement("gpu", "gpu"), WHOLE), "standard", (DELTA, DELTA)
    ),
    "experts": Case(
        8,
        2,
        64,
        PACKED,
        (HOST, Placement("recompute")),
        "chunked",
        mlp_tile_size=32,
        experts=(ExpertsPart(6, 2, 48), ExpertsPart(6, 2, 48, False)),
    ),
    "delta net, bfloat16": Case(
        8,
        4,
        64,
        (300, *PACKED, 41),
        (HOST, WHOLE),
        "chunked",
        (DELTA, FULL),
        dtype=torch.bfloat16,
    ),
}


def check_exchange(world: World) -> None:
    """Both directions and their gradients, bit for bit, against slices of tensors that every rank
    has."""
    exchange, N, rank = (
        HeadExchange(world.mesh.get_group("context")),
        world.context_size,
        world.context_rank,
    )
    generator, device = torch.Generator().manual_seed(0), world.device
    own = slice(3 * rank, 3 * rank + 3)  # tokens
    bf16 = torch.bfloat16
    for B, heads, dtype in ((1, 8, torch.float32), (3, 4, bf16), (2, 1, bf16), (1, 6, bf16)):
        copies = N // math.gcd(N, heads)
        whole = torch.randn(B, 3 * N, heads, 5, generator=generator).to(device, dtype)
        # Example: among 4 ranks, 6 heads with 2 query heads each give rank 1 query heads 3, 4, 5 of
        # heads 1, 2, 2.
        needed = torch.arange(heads * copies).view(N, -1).to(device) // copies
        x = whole[:, own].clone().requires_grad_()
        y = exchange.to_heads(x)
        assert torch.equal(y, whole[:, :, needed[rank]])
        d_whole = torch.randn(B, 3 * N, heads * copies, 5, generator=generator).to(device, dtype)
        d_ranks = d_whole.chunk(N, dim=2)
        y.backward(d_ranks[rank])
        expected = d_whole.unflatten(2, (heads, copies)).float().sum(3).to(dtype)
        assert torch.equal(x.grad, expected[:, own]) and x.grad.dtype == dtype
        if copies == 1:
            y = y.detach().requires_grad_()
            tokens = exchange.to_tokens(y)
            assert torch.equal(tokens, x)
            tokens.backward(d_whole[:, own])
            assert torch.equal(y.grad, d_ranks[rank])
            check_parts(exchange, whole[:, own].flatten(2), y.detach().flatten(2), d_whole)


def check_parts(
    exchange: HeadExchange, x: torch.Tensor, expected: torch.Tensor, d_whole: torch.Tensor
) -> None:
    """The exchange of parts, of which a rank's own comes later, makes of x [B, 3, C] what
    `to_heads` does."""
    parts = [part.clone().requires_grad_() for part in x.chunk(exchange.size, 2)]
    others = [None if rank == exchange.rank else part for rank, part in enumerate(parts)]
    y = exchange.start_parts_to_heads(others)(parts[exchange.rank])
    assert torch.equal(y, expected)
    y.backward(d_whole.flatten(2).chunk(exchange.size, 2)[exchange.rank])
    own = slice(3 * exchange.rank, 3 * exchange.rank + 3)
    assert torch.equal(torch.cat([part.grad for part in parts], 2), d_whole[:, own].flatten(2))


def check_bytes(group: dist.ProcessGroup) -> None:
    """An exchange keeps nothing for backward but its result: in all ranks, as a dry run counts."""
    for name in ("to_heads", "to_tokens", "start_parts_to_heads"):
        for after_backward in (False, True):
            expected = bytes_of(
                name, RanksOnMeta(group.size()), torch.device("meta"), after_backward
            )
            found = bytes_of(name, group, torch.device("cpu"), after_backward, expected)
            assert found == expected, (name, after_backward)


def bytes_of(
    name: str, group, device: torch.device, after_backward: bool, settled: float = math.inf
) -> int:
    """Bytes after an exchange, beside its graph, as soon as gloo's threads have let go of all above
    `settled`."""
    exchange = HeadExchange(group)
    with StorageCounter() as counter:
        x = torch.ones(2, 4 * exchange.size, 4, 3, device=device, requires_grad=True)
        parts = [None if i == exchange.rank else x.flatten(2) for i in range(exchange.size)]
        y = (
            getattr(exchange, name)(parts)(x.flatten(2))
            if "parts" in name
            else getattr(exchange, name)(x)
        )
        if after_backward:
            y.sum().backward()
        until = time.monotonic() + 5
        while counter.allocated > settled and time.monotonic() < until:
            time.sleep(0.001)
    return counter.allocated


def build(case: Case, world: World) -> Transformer:
    options = {
        "kinds": case.kinds or (FULL,),
        "tie_word_embeddings": case.tied,
        "mlps": case.experts,
    }
    options["router_aux_loss_coef"] = 0.5 * bool(case.experts)
    if case.model_type == "ministral3":
        options["rope_scaling"] = YarnScaling(4.0, 64, llama_4_scaling_beta=0.5)
    config = in_family(model_of(256, 64, 96, 2, case.H, case.G, case.K, **options), case.model_type)
    with torch.device("meta"):
        model = Transformer(config, world.tensor_size).cast(
            case.dtype if world.size == 1 else torch.float32
        )
    if world.size > 1:
        share_matrices(model, world)
        shard_model(model, model.layers, world, compute_dtype=case.dtype)
        share_sequences(model, world)
    model.to_empty(device=world.device)
    drawn = initial_weights(
        Transformer(config), seed=0
    )  # on the CPU: a GPU's generator gives other numbers
    drawn = (
        (name, torch.linspace(-0.1, 0.1, len(x)) if name.endswith(".bias") else x)
        for name, x in drawn
    )
    copy_weights(model, ((name, full.bfloat16().to(world.device)) for name, full in drawn))
    placements = case.placements if world.size > 1 else (WHOLE, WHOLE)
    heads, tile_size = case.heads_at_a_time, case.mlp_tile_size
    kinds = tuple(kind.kind if kind == DELTA else kind for kind in case.kinds)
    execution = Execution(placements, tile_size, heads, loss_impl=case.loss_impl, kinds=kinds)
    apply_execution(model, execution, arena_bytes=2**22)
    return model


def loss_and_gradients(
    case: Case, world: World, batch_size: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of the same sequences in any world, in as many micro-batches as that
    takes."""
    model, random = build(case, world), np.random.default_rng(0)
    documents = [
        Document(random.integers(1, 256, n).astype(np.uint8), np.arange(n) < n // 3)
        for n in case.lengths * 4
    ]
    loader = make_loader(
        documents, case.T, batch_size, rank=world.data_rank, world_size=world.data_size
    )
    batches = loader.next_step(SEQUENCES // batch_size // world.data_size)
    shares = [batch.slice(world.context_rank, world.context_size) for batch in batches]
    num_valid = world.sum(sum(share.num_valid_tokens for share in shares))[0] / world.tensor_size
    total = 0.0
    for share in shares:
        loss = run_model(model, share, world, num_valid)
        loss.backward()
        total += float(loss.detach())
    gradients = {
        name: p.grad.full_tensor() if world.size > 1 else p.grad
        for name, p in model.named_parameters()
    }
    return world.sum(total)[0] / world.tensor_size, gradients


def check_model(worlds: dict[int, World]) -> None:
    found = {}
    for i, (name, case) in enumerate(
        CASES.items()
    ):  # every kind of attention with both sizes, in some case
        for size in (1, 2, 4) if name == "dense, packed" else (2 if i % 3 == 1 else 4,):
            world = worlds[4 if case.experts else size]
            # One micro-batch where experts are: the auxiliary loss is of each.
            batch_size = SEQUENCES if case.experts else min(2, SEQUENCES // world.data_size)
            loss, gradients = loss_and_gradients(case, world, batch_size)
            found[name, size] = loss, gradients
            if world.is_main:
                assert_equals_one_process(f"{name}, {size} ranks a sequence", case, loss, gradients)
    world, (loss, gradients) = worlds[4], found["dense, packed", 4]
    again, repeated = loss_and_gradients(CASES["dense, packed"], world, batch_size=2)
    assert again == loss and all(
        torch.equal(repeated[name], gradient) for name, gradient in gradients.items()
    )
    with pytest.raises(ValueError, match="choose blocks together; share between fewer ranks"):
        loss_and_gradients(CASES["sparse"]._replace(G=2), world, batch_size=2)


@functools.cache
def one_process(case: Case, device: str = "cpu") -> tuple[float, dict[str, torch.Tensor]]:
    return loss_and_gradients(case, World(0, 1, torch.device(device)), SEQUENCES)


def assert_equals_one_process(
    name: str, case: Case, loss: float, gradients: dict[str, torch.Tensor], device: str = "cpu"
) -> None:
    """Compare the loss and each gradient with one process; in bfloat16 compare their errors against
    float32."""
    expected_loss, expected = one_process(case._replace(dtype=torch.float32))
    assert loss == pytest.approx(
        expected_loss, rel=1e-6 if case.dtype == torch.float32 else 5e-4
    ), name

    def errors(found: dict[str, torch.Tensor]) -> dict[str, float]:
        return {
            n: float((found[n].cpu().float() - g).norm() / g.norm()) for n, g in expected.items()
        }

    # Gradients of a decay are 1e-5 of the others: in float32, one process that splits its batch is
    # 1e-5 off as well. In bfloat16 their errors are ten times as large.
    decays = {n for n in expected if n.endswith(("A_log", "dt_bias"))}
    limits = {n: 5e-5 if n in decays else 2e-6 for n in expected}
    if case.dtype != torch.float32:
        alone = errors(one_process(case, device)[1])
        for names, most in (decays, 0.3), (expected.keys() - decays, 0.1):
            limit = 2 * max((alone[n] for n in names), default=0.0)
            assert limit < 2 * most, f"{name}: one process in {case.dtype} is wrong by {limit / 2}"
            limits |= dict.fromkeys(names, limit)
    wrong = {n: error for n, error in errors(gradients).items() if not error < limits[n]}
    assert not wrong, f"{name}: {wrong}"


def check_loss_choice(world: World) -> None:
    """The switch to the chunked loss counts the logits of a rank's own tokens."""
    case = CASES["dense, packed"]._replace(loss_impl="auto")
    own_logits = 2 * case.T // world.context_size * 256 * 4  # bytes of 2 sequences of float32
    for threshold, is_chunked in ((own_logits, False), (own_logits - 1, True)):
        with (
            mock.patch("kernels.head_loss.CHUNKED_LOSS_THRESHOLD_BYTES", threshold),
            mock.patch("kernels.head_loss.log_loss_choice") as log,
        ):
            loss_and_gradients(case, world, batch_size=2)
        assert {call.args[0] for call in log.call_args_list} == {is_chunked}


def train_shared(world: World, folder: Path) -> None:
    """One run of 5 steps of 4 sequences each, stopped and resumed by other splits of the ranks."""
    start = arguments(
        str(folder / "corpus.txt"), folder / "shared", *STEADY, "--batch_size", "2", steps=2
    )
    start += ["--init_from", str(base_of(folder))]
    start += [
        "--context_parallel_size",
        "4",
        "--gradient_accumulation_steps",
        "2",
        "--sample_tokens",
        "3",
    ]
    once, worlds = ["--gradient_accumulation_steps", "1", "--sample_tokens", "0"], worlds_of(world)
    with (
        mock.patch("training.run.metrics.peak_flops", lambda device: 1e12),
        mock.patch.object(
            train,
            "join_world",
            lambda device, **sizes: nullcontext(worlds[sizes["context_parallel_size"]]),
        ),
        mock.patch("training.run.metrics.logger.info") as said,
    ):
        assert train.main([*start, "--gradient_checkpointing"]) == 0
        [line] = [
            call.args[0] % call.args[1:]
            for call in said.call_args_list
            if "device: " in call.args[0]
        ]
        assert line.endswith("device: cpu x 4 (data x context x tensor: 1 x 4 x 1)"), line
        for flags in (
            ["--max_steps", "3"],
            ["--max_steps", "4", "--context_parallel_size", "2", *once],
            ["--max_steps", "5", "--context_parallel_size", "1", "--batch_size", "1"],
        ):
            assert train.main(only_resume(folder / "shared", *flags)) == 0
        # The newest checkpoint gives the mesh. It proves damaged: an older one gives the settings,
        # but the mesh stays.
        newest = folder / "shared" / "step_00000005"
        if world.is_main:
            damage(newest / "model.safetensors")
        world.sum(0.0)  # no rank looks at the files before
        again = only_resume(
            folder / "shared", "--resume", "auto", "--max_steps", "5", "--batch_size", "1"
        )
        assert train.main(again) == 0
        settings = json.loads((newest / "trainer.json").read_text())["trainer_state"]["settings"]
        assert settings["context_parallel_size"] == 1


def base_of(folder: Path) -> Path:
    return folder / "base/step_00000001"


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def worlds_of(world: World) -> dict[int, World]:
    """Ranks that share a sequence -> this rank's world of all ranks."""
    return {
        n: World(world.rank, world.size, world.device, make_mesh("cpu", world.size, n))
        for n in (1, 2, 4)
    }


def check_four_ranks(world: World) -> None:
    worlds = worlds_of(world)
    for size in (2, 4):
        check_exchange(worlds[size])
        check_bytes(worlds[size].mesh.get_group("context"))
    check_model(worlds)
    check_loss_choice(worlds[4])


def test_four_ranks_equal_one_process():
    run_ranks(4, check_four_ranks)


def check_two_gpus(world: World) -> None:
    check_exchange(world)
    names = (
        "dense, packed", "one document of odd length", "dense, packed, two heads",
        "sparse, one head", "nsa",
        "window, full", "delta net, full", "delta nets of one document",
    )  # fmt: skip
    check_on_gpus(world, {name: CASES[name] for name in names})


def in_bfloat16(case: Case) -> Case:
    """The case as the GPU's kernels take it, with norms of heads where attention chooses blocks.

    Heads without norms choose other blocks in bfloat16 than in float32: gradients of random weights
    differ by 0.2. Norms leave a difference of 0.1 where FP8 chooses one block of five, and of 0.05
    where it chooses three.
    """
    kinds = tuple(
        replace(kind, selected_blocks=3) if isinstance(kind, Sparse) else kind
        for kind in case.kinds
    )
    model_type = "qwen3" if kinds else case.model_type
    return case._replace(dtype=torch.bfloat16, K=64, model_type=model_type, kinds=kinds)


def check_on_gpus(world: World, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        on_gpu = in_bfloat16(case)
        loss, gradients = loss_and_gradients(on_gpu, world, batch_size=2)
        if world.is_main:
            assert_equals_one_process(name, on_gpu, loss, gradients, "cuda")


@pytest.mark.gpu(gpus=2)
def test_two_gpus_equal_one():
    run_ranks(2, check_two_gpus, device="cuda", context_parallel_size=2)


def test_a_run_goes_on_with_any_split(tmp_path, monkeypatch, capsys):
    (tmp_path / "corpus.txt").write_text(" ".join((ROOT / "model.py").read_text().split()))
    weights_of_another_shape(tmp_path / "base", **QWEN35)
    run_ranks(4, train_shared, tmp_path)
    monkeypatch.setattr("training.run.metrics.peak_flops", lambda device: 1e12)
    one, shared = tmp_path / "one", tmp_path / "shared"
    start = [
        *STEADY,
        "--batch_size",
        "4",
        "--init_from",
        str(base_of(tmp_path)),
        "--checkpoint_interval",
        "5",
    ]
    assert train.main(arguments(str(tmp_path / "corpus.txt"), one, *start, steps=6)) == 0
    capsys.readouterr()
    assert train.main(only_resume(shared, "--context_parallel_size", "2", "--max_steps", "6")) == 1
    assert "context_parallel_size 2 x tensor_parallel_size 1 must divide" in capsys.readouterr().err
    assert train.main(only_resume(shared, "--batch_size", "4", "--max_steps", "6")) == 0
    assert losses(shared) == pytest.approx(losses(one), rel=1e-5)
    lines, expected = metrics(shared), metrics(one)
    assert lines[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=1e-5)
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in expected]
    expected_weights, found = weights(one, 5), weights(shared, 5)
    assert {name: x.dtype for name, x in found.items()} == {
        name: x.dtype for name, x in expected_weights.items()
    }
    for name, weight in expected_weights.items():
        # AdamW's first updates are as large where a gradient is all rounding: 1.8e-4 in in_proj_a
        # was seen. A step of 1e-3 moves weights of 0.02 by 5%.
        assert (found[name] - weight).norm() < 1e-3 * weight.norm(), name
    work = [
        line["mfu"] * line["seconds"] for line in expected
    ]  # proportional to the FLOPs of the one process
    assert [line["mfu"] * line["seconds"] for line in lines] == pytest.approx(
        [w / 4 for w in work[:5]] + work[5:]
    )


def test_heads_that_cannot_be_shared_are_refused():
    tiny = MODEL_SIZES["tiny"]  # 4 query heads, 2 key/value heads
    check_sharing(4, tiny)
    check_sharing(2, tiny, (Sparse(),) * tiny.num_hidden_layers)
    for size in (3, 8):
        with pytest.raises(
            UserError,
            match=f"size {size} must divide the model's 4 query heads; give one of 1, 2, 4",
        ):
            check_sharing(size, tiny)
    with pytest.raises(
        UserError, match=r"size 4 must divide the model's 2 key/value heads, .* give one of 1, 2$"
    ):
        check_sharing(4, tiny, (Sparse(),) * tiny.num_hidden_layers)
    message = (
        "16 must divide the model's 16 key heads of gated delta nets and 24 query heads; give one "
        "of 1, 2, 4, 8$"
    )
    with pytest.raises(UserError, match=message):
        check_sharing(16, MODEL_SIZES["qwen3.5-27B"])
    with pytest.raises(
        UserError, match="size 4 must divide a rank's 2 query heads; give one of 1, 2"
    ):
        check_sharing(4, tiny, tensor_size=2)


@pytest.mark.parametrize(("ranks", "heads", "message"), [
    (4, 1, "4 ranks do not divide the 2 key/value heads; attend by all heads at once"),
    (2, 2, "heads_at_a_time must divide a rank's 1 key/value heads, got 2"),
])  # fmt: skip
def test_some_heads_at_a_time_are_of_a_rank(ranks, heads, message):
    config, x = MODEL_SIZES["tiny"], torch.zeros(1, 8, 128)
    attention = Attention(config, config.attention, layer=0)
    attention.exchange, attention.heads_at_a_time = mock.Mock(size=ranks), heads
    rotation = torch.ones(8, 16), torch.zeros(8, 16)
    with pytest.raises(ValueError, match=message):
        attention(x, Context(Rotations(rotation, rotation), longest=8))
