"""Copies of sharded weights: four ranks of several layouts train as one process does, and save one checkpoint."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from model import MODEL_SIZES, Transformer
from tests.ranks import run_ranks
from tests.test_train import arguments, metrics, only_resume, weights
from tests.training.data.test_packing import make_documents, make_loader
from tests.training.parallel.test_ulysses import ROOT, STEADY
from tests.training.parallel.test_world import timeout_of
from training.checkpoint.pieces import is_written_here, local_pieces
from training.host.errors import UserError
from training.optimizer import MasterAdamW
from training.parallel.fsdp import initial_weights, shard_model
from training.parallel.tensor import share_matrices
from training.parallel.ulysses import share_sequences
from training.parallel.world import World, check_replicate, make_mesh
from training.run.step import train_step

# Layouts of four ranks: (ranks that share a sequence, ranks that share a matrix, copies of the weights).
LAYOUTS = [(4, 1, 2), (1, 2, 2), (1, 1, 2)]
OTHERS = [(1, 1, 1), (1, 1, 4)]
LONG, SHORT = [62], [20, 9, 3, 4, 8, 12]  # documents of a sequence of 64 tokens


def world_of(world: World, context: int, tensor: int, replicate: int) -> World:
    return World(world.rank, 4, world.device, make_mesh("cpu", 4, context, tensor), replicate)


def train_unlike_batches(world: World, gpu_state_bytes: float = torch.inf) -> tuple[list, dict, MasterAdamW]:
    """Two steps of eight sequences: (losses and gradient norms, weights and moments after them, the optimizer).

    A document fills a sequence nearly, many short ones fill the next, then a long one comes again. Gradients are
    clipped.
    """
    with torch.device("meta"):
        model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=2), world.tensor_size)
    if world.size > 1:
        share_matrices(model, world)
        shard_model(model, model.layers, world)
        share_sequences(model, world)
    model.to_empty(device="cpu")
    optimizer = MasterAdamW(model.named_parameters(), gpu_state_bytes=gpu_state_bytes)
    optimizer.load_weights(initial_weights(model, seed=0))
    documents = make_documents([*LONG, *SHORT, *LONG] * 8)
    for document in documents:
        document.tokens[:] = document.tokens % 251 + 1
    loader = make_loader(documents, 64, 1, rank=world.data_rank, world_size=world.data_size, eos_id=0)
    steps = []
    for _ in range(2):
        batches = loader.next_step(8 // world.data_size)
        steps.append(train_step(model, optimizer, batches, world, learning_rate=1e-3, max_grad_norm=0.1))
    whole = {}
    for name, state in optimizer.state_dict().items():
        for key, tensor in state.items():
            whole[f"{name} {key}"] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return steps, whole, optimizer


def check_layouts(world: World) -> None:
    if world.is_main:
        expected_steps, expected, _ = train_unlike_batches(World(0, 1, world.device))
        assert min(norm for _, norm in expected_steps) > 0.2  # clipped
    for layout in LAYOUTS:
        own = world_of(world, *layout)
        steps, found, optimizer = train_unlike_batches(own)
        if world.is_main:
            assert sum(steps, ()) == pytest.approx(sum(expected_steps, ()), rel=2e-6), layout
            errors = {name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}
            assert max(errors.values()) < 3e-5, (layout, errors)
        check_written_once(optimizer, world.rank, layout)
    streamed = train_unlike_batches(own, gpu_state_bytes=0)
    assert streamed[0] == steps and all(torch.equal(streamed[1][name], tensor) for name, tensor in found.items())


def check_written_once(optimizer: MasterAdamW, rank: int, layout: tuple[int, ...]) -> None:
    """Each element of the weights is in a piece of one rank."""
    tensors = optimizer.weights()
    own = {name: tensor for name, tensor in tensors.items() if is_written_here(tensor, rank)}
    places = [None] * 4
    dist.all_gather_object(places, [(piece.name, piece.offset, piece.shape) for piece, _ in local_pieces(own)])
    written = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in tensors.items()}
    for name, offset, shape in itertools.chain(*places):
        written[name][tuple(slice(first, first + n) for first, n in zip(offset, shape))] += 1
    assert all((count == 1).all() for count in written.values()), layout


def check_groups(world: World) -> None:
    """Neighbouring ranks shard a copy, and all groups have the world's limit of waits."""
    meshes = {layout: world_of(world, *layout).fsdp_mesh for layout in LAYOUTS + OTHERS}
    assert meshes[1, 1, 1].mesh.tolist() == [0, 1, 2, 3] and meshes[1, 1, 2].mesh.tolist() == [[0, 1], [2, 3]]
    assert meshes[1, 2, 2].mesh.tolist() == [[[0], [2]], [[1], [3]]][world.rank % 2]
    own = world_of(world, 1, 1, 2)
    own.limit_waits(7)
    groups = own.fsdp_mesh.get_all_groups()
    assert len(groups) == 2 and {*map(timeout_of, groups)} == {7}
    own.limit_waits(600)


def train_layouts(world: World, folder: Path) -> None:
    """One run of 4 sequences per step that goes on with other layouts, and one that starts from its weights."""
    worlds = {layout: world_of(world, *layout) for layout in LAYOUTS + OTHERS}
    corpus = str(folder / "corpus.txt")
    start = arguments(corpus, folder / "run", *STEADY, "--batch_size", "1", "--replicate", "2", steps=2)
    start += ["--validation_sequences", "0"]
    with (
        mock.patch("training.run.metrics.peak_flops", lambda device: 1e12),
        mock.patch.object(train, "join_world", lambda device, **sizes: nullcontext(worlds[tuple(sizes.values())])),
        counted_collectives() as counts,
    ):
        assert train.main(start) == 0
        assert counts[1] == 3
        for flags in (
            ["--max_steps", "3", "--replicate", "1"],
            ["--max_steps", "4", "--replicate", "2", "--tensor_parallel_size", "2", "--batch_size", "2"],
        ):
            assert train.main(only_resume(folder / "run", *flags)) == 0
        flags = "--init_from", str(folder / "run" / "step_00000003"), "--replicate", "4", "--batch_size", "1"
        assert train.main(arguments(corpus, folder / "from", *STEADY, *flags, steps=1)) == 0


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Counts collectives of all ranks together, by the steps of a run: before the first, in the first, and so on.

    FSDP2's, of groups, do not count. A GPU's step has the same: nothing asks for the device.
    """
    counts, take_step = [0], train.take_step

    def counting(collective):
        def counted(*args, **kwargs):
            counts[-1] += not any(isinstance(x, dist.ProcessGroup) for x in (*args, *kwargs.values()))
            return collective(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "take_step", lambda run: counts.append(0) or take_step(run))
        for name in ("all_reduce", "broadcast", "broadcast_object_list", "all_gather_object", "barrier"):
            patch.setattr(dist, name, counting(getattr(dist, name)))
        yield counts


def check_four_ranks(world: World, folder: Path) -> None:
    check_groups(world)
    check_layouts(world)
    train_layouts(world, folder)


def test_four_ranks_equal_one_process(tmp_path, monkeypatch, capsys):
    (tmp_path / "corpus.txt").write_text(" ".join((ROOT / "model.py").read_text().split()))
    run_ranks(4, check_four_ranks, tmp_path)
    one, run = tmp_path / "one", tmp_path / "run"
    corpus = str(tmp_path / "corpus.txt")
    assert train.main(arguments(corpus, one, *STEADY, "--batch_size", "4", steps=5)) == 0
    capsys.readouterr()
    assert train.main(only_resume(run, "--tensor_parallel_size", "1", "--max_steps", "6")) == 1
    message = "error: replicate 2 x tensor_parallel_size 1 must divide the number of processes, 1; start another"
    assert capsys.readouterr().err.startswith(message)
    flags = "--tensor_parallel_size", "1", "--replicate", "1", "--batch_size", "4", "--max_steps", "5"
    assert train.main(only_resume(run, *flags)) == 0
    lines, expected = metrics(run), metrics(one)
    for name in ("loss", "gradient_norm", "tokens"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-5), name
    expected_weights = weights(one, 5)
    for name, weight in weights(run, 5).items():
        assert (weight - expected_weights[name]).norm() < 1e-4 * expected_weights[name].norm(), name
    started = json.loads((tmp_path / "from" / "config.json").read_text())
    assert started["replicate"] == 4 and metrics(tmp_path / "from")[0]["loss"] < lines[0]["loss"]


def test_copies_that_cannot_be_are_refused():
    for size, local_size, tensor, replicate in ((8, 8, 1, 8), (8, 4, 2, 4), (32, 8, 1, 2), (32, 8, 1, 8), (4, 1, 1, 2)):
        check_replicate(size, local_size, tensor, replicate)
    for size, local_size, tensor, replicate, message in (
        (1, 1, 1, 2, "replicate 2 x tensor_parallel_size 1 must divide the number of processes, 1; start"),
        (8, 8, 4, 4, "replicate 4 x tensor_parallel_size 4 must divide the number of processes, 8"),
        (
            24,
            8,
            1,
            4,
            "replicate 4 must be a multiple or a divisor of the 3 machines, .* give 3 for a copy per machine",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check_replicate(size, local_size, tensor, replicate)
