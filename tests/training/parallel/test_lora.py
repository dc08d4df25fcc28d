"""Runs with adapters on two ranks, which share the data or each sequence, equal one process."""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import train
from tests.ranks import run_ranks
from tests.runs import arguments, losses, metrics, only_resume, weights_of_another_shape
from training.memory.step import Step
from training.parallel.world import World, make_mesh

ROOT = Path(__file__).parents[3]
STEADY = [
    "--lora",
    "4",
    "--lora_plus",
    "4",
    "--learning_rate",
    "1e-3",
    "--final_learning_rate_ratio",
    "1",
]
STEADY += ["--context_length", "65", "--warmup_steps", "0", "--validation_sequences", "3"]


def adapters_in(run, step):
    return load_file(run / f"step_{step:08d}" / "adapter_model.safetensors")


def train_shared(world: World, folder: Path) -> None:
    """A run of four steps of four sequences each: shared sequences, then data, then sequences
    again."""
    worlds = {
        n: World(world.rank, world.size, world.device, make_mesh("cpu", world.size, n))
        for n in (1, 2)
    }
    unplanned = Step.unplanned

    def in_pieces(self, placement, **changes):
        return unplanned(self, placement, heads_at_a_time=1, mlp_tile_size=24, **changes)

    start = arguments(
        str(folder / "corpus.txt"), folder / "shared", "--init_from", str(base_of(folder)), *STEADY
    )
    start += [
        "--context_parallel_size",
        "2",
        "--gradient_accumulation_steps",
        "2",
        "--sample_tokens",
        "3",
    ]
    once = ["--gradient_accumulation_steps", "1", "--sample_tokens", "0"]
    join = lambda device, **sizes: nullcontext(worlds[sizes["context_parallel_size"]])  # noqa: E731
    alone = "--max_steps", "2", "--context_parallel_size", "1", *once
    with mock.patch.object(train, "join_world", join):
        assert train.main([*start, "--max_steps", "1"]) == 0
        assert train.main(only_resume(folder / "shared", *alone)) == 0
        with mock.patch.object(Step, "unplanned", in_pieces):
            for steps, size, more in (
                ("3", "1", []),
                ("4", "2", ["--gradient_accumulation_steps", "2"]),
            ):
                flags = [
                    "--max_steps",
                    steps,
                    "--context_parallel_size",
                    size,
                    "--gradient_checkpointing",
                    *more,
                ]
                assert train.main(only_resume(folder / "shared", *flags)) == 0


def base_of(folder):
    return folder / "base/step_00000001"


def test_a_run_goes_on_with_any_split(tmp_path):
    (tmp_path / "corpus.txt").write_text(" ".join((ROOT / "model.py").read_text().split()))
    weights_of_another_shape(tmp_path / "base")
    run_ranks(2, train_shared, tmp_path)
    one, shared = tmp_path / "one", tmp_path / "shared"
    start = arguments(
        str(tmp_path / "corpus.txt"), one, "--init_from", str(base_of(tmp_path)), *STEADY
    )
    assert (
        train.main([*start, "--batch_size", "4", "--max_steps", "5", "--checkpoint_interval", "1"])
        == 0
    )
    assert (
        train.main(
            only_resume(
                shared,
                "--context_parallel_size",
                "1",
                "--batch_size",
                "4",
                "--max_steps",
                "5",
                "--gradient_accumulation_steps",
                "1",
            )
        )
        == 0
    )
    assert losses(shared) == pytest.approx(losses(one), rel=1e-5)
    assert metrics(shared)[-1]["validation_loss"] == pytest.approx(
        metrics(one)[-1]["validation_loss"], rel=1e-5
    )
    for name, tensor in adapters_in(one, 5).items():
        torch.testing.assert_close(adapters_in(shared, 5)[name], tensor, rtol=1e-3, atol=2e-5)
