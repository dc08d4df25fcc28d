"""Ranks that share matrices equal one process: loss and every gradient, logits, and runs that
resume."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import train
from kernels.attention import Window
from kernels.attention.full import FULL
from kernels.head_loss import NextToken
from model import MODEL_SIZES
from tests.ranks import run_ranks
from tests.runs import arguments, metrics, only_resume, weights
from tests.training.parallel.test_ulysses import (
    HOST,
    LLAMA,
    NATIVE,
    ONE,
    PACKED,
    QWEN2,
    ROOT,
    SEQUENCES,
    SPARSE,
    STEADY,
    Case,
    assert_equals_one_process,
    build,
    check_on_gpus,
    loss_and_gradients,
)
from training.checkpoint.pieces import read_tensors
from training.checkpoint.weights import find_weights
from training.host.errors import UserError
from training.memory.execution import WHOLE, Placement
from training.parallel.tensor import check_matrix_sharing
from training.parallel.world import World, make_mesh

AGAIN, KEPT, PAIR = Placement(), Placement("gpu", "host"), Placement("recompute", "gpu")
SPARSE_LENGTHS, NSA_LENGTHS = (150, 300, 41), (1200, 300, 77, 400)
WINDOWS = Window(64), FULL
TILES = {"mlp_tile_size": 16}
ONE_HEAD = {"heads_at_a_time": 1, **TILES}
# Name -> (splits of 4 ranks: how many share each sequence and each matrix; the case).
CASES = {
    "packed, untied": (
        [(1, 2), (1, 4)],
        Case(8, 4, 64, PACKED, (WHOLE, HOST), "chunked", tied=False, **TILES),
    ),
    "one document": ([(2, 2)], Case(8, 4, 67, ONE, (AGAIN, PAIR), "standard", **ONE_HEAD, **QWEN2)),
    "sparse": (
        [(1, 2)],
        Case(8, 4, 256, SPARSE_LENGTHS, (KEPT, WHOLE), "standard", SPARSE, tied=False, **QWEN2),
    ),
    "sparse, one head": (
        [(2, 2)],
        Case(8, 4, 256, SPARSE_LENGTHS, (AGAIN, HOST), "chunked", SPARSE, **ONE_HEAD, **LLAMA),
    ),
    "nsa": (
        [(1, 4)],
        Case(8, 4, 321, NSA_LENGTHS, (WHOLE, KEPT), "chunked", NATIVE, **TILES, **LLAMA),
    ),
    "nsa, one head": (
        [(1, 2)],
        Case(8, 4, 321, NSA_LENGTHS, (AGAIN, KEPT), "standard", NATIVE, **ONE_HEAD),
    ),
    "gemma3": (
        [(1, 2), (2, 2)],
        Case(
            8,
            4,
            160,
            (300, 41, 150),
            (AGAIN, HOST),
            "chunked",
            WINDOWS,
            **ONE_HEAD,
            model_type="gemma3_text",
        ),
    ),
    "bfloat16": (
        [(1, 4)],
        Case(8, 4, 64, PACKED, (KEPT, WHOLE), "chunked", dtype=torch.bfloat16, **TILES),
    ),
    "bfloat16, standard": (
        [(2, 2)],
        Case(8, 4, 64, PACKED, (AGAIN, WHOLE), "standard", dtype=torch.bfloat16, **QWEN2),
    ),
}


def check_four_ranks(world: World, folder: Path) -> None:
    worlds = worlds_of(world)
    check_streamed_weights(worlds[2, 2], folder)
    for name, (splits, case) in CASES.items():
        for split in splits:
            loss, gradients = loss_and_gradients(
                case, worlds[split], min(2, SEQUENCES // worlds[split].data_size)
            )
            if world.is_main:
                assert_equals_one_process(f"{name}, {split}", case, loss, gradients)
    check_logits(worlds[1, 4])


def check_streamed_weights(world: World, folder: Path) -> None:
    """Biases and matrices of released files, sharded twice, each rank's own part bit for bit."""
    model = build(CASES["one document"][1], world)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    released = {
        name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()
    }
    if world.is_main:
        save_file(
            {f"model.{name}": weight for name, weight in released.items()},
            folder / "model.safetensors",
        )
    torch.distributed.barrier()
    with mock.patch("training.checkpoint.pieces.PIECE_BYTES", 2**9):
        read_tensors(find_weights(folder, model.declared), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().full_tensor(), released[name].float()), name


def check_logits(world: World) -> None:
    """Compare the logits of all words, the loss of the same call, and tokens generated with a
    key/value cache."""
    case, ids = Case(8, 4, 64, ONE, (AGAIN, HOST)), torch.randint(256, (2, 40))
    torch.distributed.broadcast(ids, src=0)
    shared, alone = build(case, world), build(case, World(0, 1, world.device))
    for loss in (None, NextToken.from_labels(ids)):
        found, expected = (model(ids, loss=loss, return_logits=True) for model in (shared, alone))
        torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    assert torch.equal(shared.generate(ids, 3), alone.generate(ids, 3))


def worlds_of(world: World) -> dict[tuple[int, int], World]:
    """(ranks that share a sequence, ranks that share a matrix) -> this rank's world of four."""
    splits = (1, 2), (2, 1), (2, 2), (1, 4)
    return {
        split: World(world.rank, 4, world.device, make_mesh("cpu", 4, *split)) for split in splits
    }


def test_four_ranks_equal_one_process(tmp_path):
    run_ranks(4, check_four_ranks, tmp_path)


def check_two_gpus(world: World) -> None:
    names = "packed, untied", "sparse", "nsa, one head", "bfloat16, standard"
    check_on_gpus(world, {name: CASES[name][1] for name in names})


@pytest.mark.gpu(gpus=2)
def test_two_gpus_equal_one():
    run_ranks(2, check_two_gpus, device="cuda", tensor_parallel_size=2)


def train_shared(world: World, folder: Path) -> None:
    """One run of 4 steps of 4 sequences each, stopped and resumed by other splits of the ranks, and
    with copies."""
    worlds = worlds_of(world)
    start = arguments(
        str(folder / "corpus.txt"), folder / "shared", *STEADY, "--batch_size", "2", steps=2
    )
    start += [
        "--context_parallel_size",
        "2",
        "--tensor_parallel_size",
        "2",
        "--gradient_accumulation_steps",
        "2",
    ]
    with (
        mock.patch("training.run.metrics.peak_flops", lambda device: 1e12),
        mock.patch.object(
            train, "join_world", lambda device, **sizes: nullcontext(world_of(worlds, **sizes))
        ),
        counted_collectives() as counts,
    ):
        assert train.main([*start, "--gradient_checkpointing"]) == 0
        assert (
            counts[1] == 3
        )  # sums: of targets; of the norm and the loss; of signals, saving and metrics
        once, two = ["--gradient_accumulation_steps", "1"], ["--tensor_parallel_size", "2"]
        for flags in (
            ["--max_steps", "3", "--tensor_parallel_size", "1", "--replicate", "2", *once],
            [
                "--max_steps",
                "4",
                *two,
                "--replicate",
                "1",
                "--context_parallel_size",
                "1",
                "--sample_tokens",
                "3",
            ],
        ):
            assert train.main(only_resume(folder / "shared", *flags)) == 0


def world_of(
    worlds: dict, context_parallel_size: int, tensor_parallel_size: int, replicate: int
) -> World:
    return replace(worlds[context_parallel_size, tensor_parallel_size], replicate=replicate)


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Counts collectives of all ranks together, by the steps of a run: before the first, in the
    first, and so on.

    FSDP2's, of groups, do not count. A GPU's step has the same: nothing asks for the device.
    """
    counts, take_step = [0], train.take_step

    def counting(collective):
        def counted(*args, **kwargs):
            counts[-1] += not any(
                isinstance(x, torch.distributed.ProcessGroup) for x in (*args, *kwargs.values())
            )
            return collective(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "take_step", lambda run: counts.append(0) or take_step(run))
        for name in (
            "all_reduce",
            "broadcast",
            "broadcast_object_list",
            "all_gather_object",
            "barrier",
        ):
            patch.setattr(torch.distributed, name, counting(getattr(torch.distributed, name)))
        yield counts


def test_a_run_goes_on_with_any_split(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt").write_text(" ".join((ROOT / "model.py").read_text().split()))
    run_ranks(4, train_shared, tmp_path)
    monkeypatch.setattr("training.run.metrics.peak_flops", lambda device: 1e12)
    one, shared = tmp_path / "one", tmp_path / "shared"
    assert (
        train.main(
            arguments(str(tmp_path / "corpus.txt"), one, *STEADY, "--batch_size", "4", steps=5)
        )
        == 0
    )
    assert (
        train.main(
            only_resume(
                shared, "--tensor_parallel_size", "1", "--batch_size", "4", "--max_steps", "5"
            )
        )
        == 0
    )
    lines, expected = metrics(shared), metrics(one)
    # Rounding grows from step to step, in gradients most: by 3e-5 with some texts.
    for name, rel in {"loss": 1e-5, "gradient_norm": 1e-4, "tokens": 0}.items():
        assert [line[name] for line in lines] == pytest.approx(
            [line[name] for line in expected], rel=rel
        ), name
    assert lines[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=1e-5)
    work = [
        line["mfu"] * line["seconds"] for line in expected
    ]  # proportional to the FLOPs of the one process
    assert [line["mfu"] * line["seconds"] for line in lines] == pytest.approx(
        [w / 4 for w in work[:4]] + work[4:]
    )
    expected_weights = weights(one, 5)
    for name, weight in weights(shared, 5).items():
        assert (weight - expected_weights[name]).norm() < 1e-4 * expected_weights[name].norm(), name


def test_matrices_that_cannot_be_shared_are_refused():
    check_matrix_sharing(8, MODEL_SIZES["4B"])
    message = (
        "size 16 must divide the model's num_key_value_heads 8, intermediate_size 9728 and "
        "vocab_size 151936"
    )
    with pytest.raises(UserError, match=f"{message}; give one of 1, 2, 4, 8$"):
        check_matrix_sharing(16, MODEL_SIZES["4B"])
    with pytest.raises(
        UserError, match=r"part q, k and v, .* gated delta nets .*; use context_parallel_size"
    ):
        check_matrix_sharing(2, MODEL_SIZES["qwen3.5-4B"])
