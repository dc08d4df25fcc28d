"""An optimizer's state comes back from a checkpoint, in any format, wherever it lives."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

import training.checkpoint.state
import training.optim.formats
import training.optim.inventory
from benchmarks.bench_train_step import resident_bytes
from tests.optimizers import (
    DTYPES,
    PLACEMENTS,
    WIDE,
    assert_equal_states,
    backward,
    copy_of_state,
    make_optimizer,
    make_parameters,
    save_state,
    values_of,
    weights_of,
)
from tests.optimizers import small_pieces as small_pieces  # a fixture of all tests here
from tests.ranks import run_ranks
from tests.training.optim.test_adamw import BFloat16Moments
from training.checkpoint import pieces
from training.checkpoint.manifest import OPTIMIZER, verify_checkpoint
from training.checkpoint.pieces import flat
from training.checkpoint.state import load_state
from training.host.errors import UserError


@DTYPES
@pytest.mark.parametrize(
    ("saved", "loaded"), [([], [*WIDE]), ([*WIDE], []), (["matrix"], ["other", "norm.weight"])]
)
@pytest.mark.parametrize(
    "formats", [("float32",) * 2, ("compact",) * 2, ("float32", "compact"), ("compact", "float32")]
)
def test_a_checkpoint_is_loaded_wherever_weights_live(
    dtype, saved, loaded, formats, device, tmp_path
):
    """State of the same format is restored exactly, masters by every format."""

    def make(host_weights, state_format):
        parameters = make_parameters(dtype, device, WIDE)
        return make_optimizer(
            parameters.items(), state_format=state_format, host_weights=host_weights
        )

    def masters(optimizer):
        for state in optimizer.states.values():
            kept = {key: tensor.cpu() for key, tensor in state.tensors.items()}
            yield state.format.read(kept, state.weight.detach().flatten().cpu())["master"]

    optimizer, other, third = (
        make(saved, formats[0]),
        make(loaded, formats[1]),
        make([], formats[1]),
    )
    for seed in range(3):
        backward(optimizer.parameters, seed, optimizer.homes)
        optimizer.step(1e-2)
    path = save_state(tmp_path, 3, optimizer.state_dict(), optimizer.weights())
    for each in (other, third):
        load_state(each, path)
        assert_equal_states(weights_of(each), weights_of(optimizer))
        assert all(map(torch.equal, masters(each), masters(optimizer)))
        backward(each.parameters, 10, each.homes)
        each.step(1e-2)
    assert_equal_states(copy_of_state(other), copy_of_state(third))
    assert_equal_states(weights_of(other), weights_of(third))
    if formats[0] == formats[1]:
        backward(optimizer.parameters, 10, optimizer.homes)
        optimizer.step(1e-2)
        assert_equal_states(copy_of_state(other), copy_of_state(optimizer))


def assert_converted(found, expected, saved):
    """Masters are equal; moments are what a format in between left of them."""
    for name, values in values_of(expected).items():
        for key, value in values_of(found)[name].items():
            if key == "master":
                assert torch.equal(value, values[key]), name
            elif key == "exp_avg" and saved == "float32":
                torch.testing.assert_close(
                    value, values[key], rtol=0, atol=1e-2 * float(values[key].abs().max())
                )
            elif key == "exp_avg_sq" and saved == "float32":
                root = values[key].sqrt()
                torch.testing.assert_close(
                    value.sqrt(), root, rtol=0, atol=1e-2 * float(root.max())
                )
            elif key != "parameter":
                assert torch.equal(value, values[key]), (name, key)
        assert found.steps == expected.steps


@DTYPES
@pytest.mark.parametrize("loaded_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("saved", "loaded"), itertools.product(("compact", "float32"), repeat=2))
@pytest.mark.parametrize(
    "placements", [("device", "host"), ("host", "partly"), ("partly", "device")]
)
def test_a_checkpoint_is_loaded_in_either_format(
    dtype, loaded_dtype, saved, loaded, placements, device, tmp_path
):
    parameters, restored = (
        make_parameters(dtype, device, WIDE),
        make_parameters(loaded_dtype, device, WIDE),
    )
    on = [PLACEMENTS[placement] for placement in placements]
    optimizer = make_optimizer(parameters.items(), gpu_state_bytes=on[0], state_format=saved)
    for seed in range(3):
        backward(parameters, seed)
        optimizer.step(1e-2)
    path = save_state(tmp_path, 3, optimizer.state_dict(), parameters)
    verify_checkpoint(path)
    in_file = load_file(path / OPTIMIZER)
    assert (in_file["matrix.exp_avg"].dtype == torch.int8) == (saved == "compact")
    assert_equal_states(
        {"": in_file}, {"": {key: t.cpu() for key, t in flat(optimizer.state_dict()).items()}}
    )
    other = make_optimizer(restored.items(), gpu_state_bytes=on[1], state_format=loaded)
    load_state(other, path)
    assert_converted(other, optimizer, None if saved == loaded else saved)
    if saved == loaded and dtype == loaded_dtype:
        for both, its_optimizer in ((parameters, optimizer), (restored, other)):
            backward(both, 10)
            its_optimizer.step(1e-2)
        assert_equal_states(copy_of_state(other), copy_of_state(optimizer))
        assert all(torch.equal(parameters[n], restored[n]) for n in parameters)


def test_state_of_the_same_names_in_another_dtype_is_converted(tmp_path, monkeypatch):
    parameters, restored = (make_parameters(torch.bfloat16, "cpu", WIDE) for _ in range(2))
    optimizer = make_optimizer(parameters.items())
    backward(parameters, 0)
    optimizer.step(1e-2)
    state = optimizer.state_dict()
    path = save_state(tmp_path, 3, state, parameters)
    with monkeypatch.context() as patch:
        patch.setattr(training.optim.formats, "Float32State", BFloat16Moments)
        other = make_optimizer(restored.items())
    load_state(other, path)
    for name, loaded in copy_of_state(other).items():
        assert torch.equal(loaded["master"], state[name]["master"]) and loaded["step"] == 1
        for key in ("exp_avg", "exp_avg_sq"):
            assert (
                torch.equal(loaded[key], state[name][key].bfloat16())
                and loaded[key].dtype == torch.bfloat16
            )
    assert all(torch.equal(parameters[n], restored[n]) for n in parameters)
    state["matrix"]["exp_avg"] = state["matrix"]["exp_avg"].half()
    path = save_state(tmp_path, 4, state, parameters)
    with pytest.raises(
        UserError, match=r"another model or optimizer: matrix has exp_avg in torch\.float16"
    ):
        load_state(make_optimizer(restored.items()), path)


LARGE = {
    "matrix": (10240, 1536),
    "norm.weight": (1536,),
}  # float32 state of 189 MB, compact of 65 MB


PIECES_BYTES = (
    48 * 2**20
)  # bound on all pieces on their way, of the sizes below: 24 MiB were measured


def save_large(world, folder, saved):
    parameters = make_parameters(torch.bfloat16, "cpu", LARGE)
    state = make_optimizer(parameters.items(), state_format=saved).state_dict()
    save_state(folder, 3, state, parameters)


def check_memory_of_loading(world, folder, loaded, gpu_state_bytes):
    # Two threads, each with a piece of 64K elements, so that a whole state stands out.
    pieces.IO_THREADS, pieces.PIECE_BYTES, training.optim.inventory.PIECE_ELEMENTS = 2, 2**17, 2**16
    pieces.CONVERTED_BYTES = training.checkpoint.state.CONVERTED_BYTES = 2**17
    torch.set_num_threads(1)  # threads of OpenMP would wait for each other at full load
    parameters = make_parameters(torch.bfloat16, "cpu", LARGE)
    before = resident_bytes()
    arguments = {"accumulate": False, "gpu_state_bytes": gpu_state_bytes, "state_format": loaded}
    optimizer = make_optimizer(parameters.items(), **arguments)
    state = sum(
        tensor.nbytes for each in optimizer.states.values() for tensor in each.tensors.values()
    )
    load_state(optimizer, folder / "step_00000003")
    grown = resident_bytes("VmHWM") - before
    assert grown < state + PIECES_BYTES, (grown, state)


@pytest.mark.parametrize(
    "saved, loaded, placement",
    [
        ("compact", "compact", "device"),
        ("float32", "compact", "host"),
        ("compact", "float32", "device"),
    ],
)
def test_loading_takes_no_more_host_memory_than_the_state_and_some_pieces(
    saved, loaded, placement, tmp_path
):
    """On a CPU, where both placements are host memory. A whole state read before it is converted
    would exceed it."""
    run_ranks(1, save_large, tmp_path, saved)
    run_ranks(1, check_memory_of_loading, tmp_path, loaded, PLACEMENTS[placement])


def test_state_of_another_model_is_refused_in_another_format(tmp_path):
    parameters = make_parameters(torch.bfloat16, "cpu", WIDE)
    state = make_optimizer(parameters.items(), state_format="compact").state_dict()
    path = save_state(tmp_path, 3, state, parameters)
    for shape, message in (((6, 32), r"shape \[6, 64\]"), ((3, 64), r"\[6, 64\]")):
        other = make_optimizer(
            make_parameters(torch.bfloat16, "cpu", WIDE | {"matrix": shape}).items()
        )
        with pytest.raises(UserError, match=message):
            load_state(other, path)
    state["matrix"].pop("exp_avg_scale")
    path = save_state(tmp_path, 4, state, parameters)
    with pytest.raises(UserError, match="another model or optimizer"):
        load_state(make_optimizer(parameters.items()), path)


@pytest.mark.parametrize(
    ("saved", "loaded", "key"),
    [("float32", "compact", "exp_avg_sq"), ("compact", "float32", "exp_avg_scale")],
)
def test_state_that_is_not_finite_is_refused_in_another_format(saved, loaded, key, tmp_path):
    parameters = make_parameters(torch.bfloat16, "cpu", WIDE)
    state = make_optimizer(parameters.items(), state_format=saved).state_dict()
    path = save_state(tmp_path, 3, state, parameters)
    tensors = load_file(path / OPTIMIZER)
    tensors[f"matrix.{key}"].view(-1)[1] = float("nan")
    save_file(tensors, path / OPTIMIZER)
    with pytest.raises(UserError, match=rf"matrix\.{key} in .* is not finite"):
        load_state(make_optimizer(parameters.items(), state_format=loaded), path)
