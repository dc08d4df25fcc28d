"""Copies of sharded weights: four ranks of several layouts train as one process does, and save each
element once."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from kernels.attention.full import FULL
from kernels.gated_delta_net import DeltaNet
from model import MODEL_SIZES, Transformer
from tests.optimizers import make_optimizer
from tests.ranks import run_ranks
from tests.shapes import reshape
from tests.training.data.test_packing import make_documents, make_loader
from tests.training.parallel.test_world import timeout_of
from training.checkpoint.pieces import is_written_here, local_pieces
from training.checkpoint.state import load_weights
from training.host.errors import UserError
from training.optim.adamw import MasterAdamW
from training.parallel.fsdp import initial_weights, shard_model
from training.parallel.tensor import share_matrices
from training.parallel.ulysses import share_sequences
from training.parallel.world import World, check_replicate, make_mesh
from training.run.train_step import train_step

# Layouts of four ranks: (ranks that share a sequence, ranks that share a matrix, copies of the
# weights).
LAYOUTS = [(4, 1, 2), (1, 2, 2), (1, 1, 2)]
OTHERS = [(1, 1, 1), (1, 1, 4)]
LONG, SHORT = [62], [20, 9, 3, 4, 8, 12]  # documents of a sequence of 64 tokens


def world_of(world: World, context: int, tensor: int, replicate: int) -> World:
    return World(world.rank, 4, world.device, make_mesh("cpu", 4, context, tensor), replicate)


def train_unlike_batches(
    world: World, kinds: tuple = (FULL,), gpu_state_bytes: float = torch.inf
) -> tuple[list, dict, MasterAdamW]:
    """Two steps of eight sequences: (losses and gradient norms, weights and moments after them, the
    optimizer).

    A document fills a sequence nearly, many short ones fill the next, then a long one comes again.
    Gradients are clipped.
    """
    with torch.device("meta"):
        config = reshape(MODEL_SIZES["tiny"], num_hidden_layers=2, kinds=kinds)
        model = Transformer(config, world.tensor_size)
    if world.size > 1:
        share_matrices(model, world)
        shard_model(model, model.layers, world)
        share_sequences(model, world)
    model.to_empty(device="cpu")
    optimizer = make_optimizer(model.named_parameters(), gpu_state_bytes=gpu_state_bytes)
    load_weights(optimizer, initial_weights(model, seed=0))
    documents = make_documents([*LONG, *SHORT, *LONG] * 8)
    for document in documents:
        document.tokens[:] = document.tokens % 251 + 1
    loader = make_loader(
        documents, 64, 1, rank=world.data_rank, world_size=world.data_size, eos_id=0
    )
    steps = []
    for _ in range(2):
        batches = loader.next_step(8 // world.data_size)
        steps.append(
            train_step(model, optimizer, batches, world, learning_rate=1e-3, max_grad_norm=0.1)[:2]
        )
    whole = {}
    for name, state in optimizer.state_dict().items():
        for key, tensor in state.items():
            whole[f"{name} {key}"] = (
                tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
            )
    return steps, whole, optimizer


def check_layouts(world: World) -> None:
    expect = functools.cache(functools.partial(train_unlike_batches, World(0, 1, world.device)))
    for layout in LAYOUTS:
        own = world_of(world, *layout)
        kinds = (FULL,) if own.tensor_size > 1 else (DeltaNet(4, 4, 16, 16), FULL)
        steps, found, optimizer = train_unlike_batches(own, kinds)
        if world.is_main:
            expected_steps, expected, _ = expect(kinds)
            assert min(norm for _, norm in expected_steps) > 0.2  # clipped
            assert sum(steps, ()) == pytest.approx(sum(expected_steps, ()), rel=2e-6), layout
            errors = {
                name: float((found[name] - tensor).norm() / tensor.norm())
                for name, tensor in expected.items()
            }
            # Gradients of a decay are tiny sums of large terms: float32 leaves 5e-4 of them in one
            # process as well.
            limits = {
                name: 1e-3 if "A_log" in name or "dt_bias" in name else 3e-5 for name in errors
            }
            assert all(error < limits[name] for name, error in errors.items()), (layout, errors)
        check_written_once(optimizer, world.rank, layout)
    streamed = train_unlike_batches(own, kinds, gpu_state_bytes=0)
    assert streamed[0] == steps and all(
        torch.equal(streamed[1][name], tensor) for name, tensor in found.items()
    )


def check_written_once(optimizer: MasterAdamW, rank: int, layout: tuple[int, ...]) -> None:
    """Each element of the weights is in a piece of one rank."""
    tensors = optimizer.parameters
    own = {name: tensor for name, tensor in tensors.items() if is_written_here(tensor, rank)}
    places = [None] * 4
    dist.all_gather_object(
        places, [(piece.name, piece.offset, piece.shape) for piece, _ in local_pieces(own)]
    )
    written = {
        name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in tensors.items()
    }
    for name, offset, shape in itertools.chain(*places):
        written[name][tuple(slice(first, first + n) for first, n in zip(offset, shape))] += 1
    assert all((count == 1).all() for count in written.values()), layout


def check_groups(world: World) -> None:
    """Neighbouring ranks shard a copy, and all groups have the world's limit of waits."""
    meshes = {layout: world_of(world, *layout).fsdp_mesh for layout in LAYOUTS + OTHERS}
    assert meshes[1, 1, 1].mesh.tolist() == [0, 1, 2, 3] and meshes[1, 1, 2].mesh.tolist() == [
        [0, 1],
        [2, 3],
    ]
    assert meshes[1, 2, 2].mesh.tolist() == [[[0], [2]], [[1], [3]]][world.rank % 2]
    own = world_of(world, 1, 1, 2)
    own.limit_waits(7)
    groups = own.fsdp_mesh.get_all_groups()
    assert len(groups) == 2 and {*map(timeout_of, groups)} == {7}
    own.limit_waits(600)


def check_four_ranks(world: World) -> None:
    check_groups(world)
    check_layouts(world)


def test_four_ranks_equal_one_process():
    run_ranks(4, check_four_ranks)


def test_copies_that_cannot_be_are_refused():
    for size, local_size, tensor, replicate in (
        (8, 8, 1, 8),
        (8, 4, 2, 4),
        (32, 8, 1, 2),
        (32, 8, 1, 8),
        (4, 1, 1, 2),
    ):
        check_replicate(size, local_size, tensor, replicate)
    divide, machines = (
        "must divide the number of processes",
        "must be a multiple or a divisor of the 3 machines",
    )
    for size, local_size, tensor, replicate, message in (
        (1, 1, 1, 2, f"replicate 2 x tensor_parallel_size 1 {divide}, 1; start"),
        (8, 8, 4, 4, f"replicate 4 x tensor_parallel_size 4 {divide}, 8"),
        (24, 8, 1, 4, f"replicate 4 {machines}, .* give 3 for a copy per machine"),
    ):
        with pytest.raises(UserError, match=message):
            check_replicate(size, local_size, tensor, replicate)
