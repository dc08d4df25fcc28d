import functools
import gc
import math
import os
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import training.checkpoint.state
import training.optim.adamw
import training.optim.formats
import training.optim.inventory
from tests.checkpoints import parameters_of
from tests.gpu import free_memory
from tests.optimizers import (
    DTYPES,
    MICRO_BATCHES,
    PLACEMENT,
    PLACEMENTS,
    SHAPES,
    STATE_FORMAT,
    WIDE,
    assert_equal_states,
    backward,
    copy_of_state,
    make_optimizer,
    make_parameters,
    save_state,
    weights_of,
)
from tests.optimizers import small_pieces as small_pieces  # a fixture of all tests here
from training.checkpoint.manifest import OPTIMIZER
from training.checkpoint.state import load_weights, read_weights
from training.checkpoint.weights import find_weights
from training.host.memory import PinnedArena
from training.optim.adamw import warmup_cosine
from training.optim.formats import Float32State, Kept
from training.optim.inventory import LEAVING_BYTES, Inventory


@DTYPES
@MICRO_BATCHES
@PLACEMENT
def test_equals_adamw_in_float64(dtype, micro_batches, placement, device):
    """The update of Loshchilov and Hutter, algorithm 2, written out, with clipping by the global
    norm."""
    parameters = make_parameters(dtype, device)
    optimizer = make_optimizer(
        parameters.items(),
        weight_decay=0.1,
        accumulate=micro_batches > 1,
        gpu_state_bytes=PLACEMENTS[placement],
    )
    expected = {n: p.detach().double() for n, p in parameters.items()}
    m, v = ({n: torch.zeros_like(e) for n, e in expected.items()} for _ in range(2))
    for step in range(1, 6):
        gradients = [backward(parameters, seed=10 * step + micro) for micro in range(micro_batches)]
        assert all(p.grad is None for p in parameters.values())
        sums = {n: sum(gradient[n].double() for gradient in gradients) for n in expected}
        norm = math.sqrt(sum(g.square().sum() for g in sums.values()))
        max_norm = norm * (0.5 if step % 2 else 2.0)
        assert optimizer.clip_grad_norm(max_norm)[0] == pytest.approx(norm, rel=1e-5)
        optimizer.step(1e-2)
        for n in expected:
            g = sums[n] * min(1.0, max_norm / norm)
            expected[n] *= 1 - 1e-2 * (0.0 if n == "norm.weight" else 0.1)
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.95 * v[n] + 0.05 * g**2
            expected[n] -= (
                1e-2 * (m[n] / (1 - 0.9**step)) / ((v[n] / (1 - 0.95**step)).sqrt() + 1e-8)
            )
    for n, state in optimizer.state_dict().items():
        for found, reference in zip(
            (state["master"], state["exp_avg"], state["exp_avg_sq"]), (expected[n], m[n], v[n])
        ):
            torch.testing.assert_close(found.double().to(device), reference, rtol=1e-5, atol=1e-6)
        assert torch.equal(parameters[n], state["master"].to(parameters[n]))
        assert state["step"] == 5


class BFloat16Moments(Float32State):
    """A format with other dtypes: moments in bfloat16, widened for the update."""

    @property
    def kept(self):
        return super().kept | dict.fromkeys(("exp_avg", "exp_avg_sq"), Kept(torch.bfloat16))

    def update_together(self, pieces, update):
        for state, *rest in pieces:
            moments = {name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}
            super().update_together([(state | moments, *rest)], update)
            for name, moment in moments.items():
                state[name].copy_(moment)


@DTYPES
@MICRO_BATCHES
@pytest.mark.parametrize("placement", ["host", "partly"])
def test_another_format_is_streamed_saved_and_counted(
    dtype, micro_batches, placement, device, monkeypatch
):
    expected, _, _ = run(make_parameters(dtype, device), "device", micro_batches)
    monkeypatch.setattr(training.optim.formats, "Float32State", BFloat16Moments)
    parameters = make_parameters(dtype, device)
    found = run(parameters, placement, micro_batches)
    assert_equal_runs(found, run(make_parameters(dtype, device), "device", micro_batches))
    for name, tensors in found[0].items():
        assert tensors["exp_avg"].dtype == tensors["exp_avg_sq"].dtype == torch.bfloat16
        torch.testing.assert_close(
            tensors["master"], expected[name]["master"], rtol=1e-2, atol=1e-2
        )
    elements = sum(p.numel() for p in parameters.values())
    assert (
        Inventory.of(parameters.items()).gpu_state
        == {torch.bfloat16: 8, torch.float32: 4}[dtype] * elements
    )


def test_equals_torchs_optimizer(device):
    """A float32 parameter of one piece gets the numbers of torch.optim.AdamW, bit for bit by
    PyTorch's kernel."""
    parameters, theirs = (
        {n: make_parameters(torch.float32, device)[n] for n in ("norm.weight",)} for _ in range(2)
    )
    optimizer = make_optimizer(parameters, gpu_state_bytes=0, impl="torch")
    reference = torch.optim.AdamW(
        theirs.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for seed in range(5):
        backward(parameters, seed), backward(theirs, seed)
        optimizer.step(1e-2), reference.step(), reference.zero_grad()
        assert torch.equal(parameters["norm.weight"], theirs["norm.weight"])


def run(
    parameters,
    placement,
    micro_batches,
    steps=5,
    prepare=None,
    state_format="float32",
    host_weights=(),
    impl="auto",
):
    """The state, the weights and the norms after some steps, the last one clipped."""
    optimizer = make_optimizer(
        parameters.items(), accumulate=micro_batches > 1,
        gpu_state_bytes=PLACEMENTS.get(placement, placement),
        state_format=state_format, host_weights=host_weights, impl=impl,
    )  # fmt: skip
    if prepare:
        prepare(optimizer)
    norms = []
    for step in range(steps):
        for micro in range(micro_batches):
            backward(parameters, seed=10 * step + micro, homes=optimizer.homes)
        norms += optimizer.clip_grad_norm(1.0 if step == steps - 1 else math.inf)
        optimizer.step(1e-2)
    return copy_of_state(optimizer), weights_of(optimizer), norms


def assert_equal_runs(found, expected):
    """Compare state, weights and norms bit for bit."""
    assert found[2] == expected[2]
    assert_equal_states(found[0], expected[0])
    assert_equal_states(found[1], expected[1])


# Where state is, and whose weights are in host memory.
PLACES = pytest.mark.parametrize(("placement", "host_weights"), [
    ("host", []), ("partly", []), ("device", ["matrix"]), ("device", ["norm.weight", "other"]),
    ("device", [*SHAPES]),
], ids=["host", "partly", "1", "2", "3"])  # fmt: skip


@DTYPES
@MICRO_BATCHES
@STATE_FORMAT
@PLACES
def test_places_agree_bit_for_bit(
    dtype, micro_batches, state_format, placement, host_weights, device
):
    parameters = make_parameters(dtype, device, WIDE)
    found = run(
        parameters, placement, micro_batches, state_format=state_format, host_weights=host_weights
    )
    expected = run(
        make_parameters(dtype, device, WIDE), "device", micro_batches, state_format=state_format
    )
    assert_equal_runs(found, expected)
    assert [n for n, p in parameters.items() if not p.untyped_storage().nbytes()] == host_weights


class FileArena(PinnedArena):
    """An arena whose bytes are a file's, which the system reads and writes page by page."""

    def __init__(self, path, num_bytes, device):
        self.num_bytes, self.used_bytes, self.device = num_bytes, 0, device
        self._bytes = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


@DTYPES
@MICRO_BATCHES
@STATE_FORMAT
def test_state_and_weights_may_wait_in_a_file(
    dtype, micro_batches, state_format, device, monkeypatch, tmp_path
):
    expected = run(
        make_parameters(dtype, device, WIDE), "device", micro_batches, state_format=state_format
    )
    monkeypatch.setattr(
        training.optim.inventory, "PinnedArena", functools.partial(FileArena, tmp_path / "state")
    )
    parameters, optimizers = make_parameters(dtype, device, WIDE), []
    found = run(
        parameters,
        "host",
        micro_batches,
        state_format=state_format,
        host_weights=[*WIDE],
        prepare=optimizers.append,
    )
    assert_equal_runs(found, expected)
    in_file = (tmp_path / "state").read_bytes()
    for state in optimizers[0].states.values():
        for tensor in (state.home, *state.tensors.values()):
            assert tensor.view(-1).view(torch.uint8).numpy().tobytes() in in_file


@DTYPES
@STATE_FORMAT
@PLACES
def test_masters_start_from_float32_weights_and_files(
    dtype, state_format, placement, host_weights, device, tmp_path
):
    """Float32 shards under FSDP do the same: bf16 parameters are rounded, their masters are not."""
    weights = {n: torch.randn(shape, device=device) for n, shape in WIDE.items()}
    save_file(
        {f"model.{n}": weight.cpu() for n, weight in weights.items()},
        tmp_path / "model.safetensors",
    )
    entries = find_weights(tmp_path, parameters_of(WIDE))
    options = {
        "state_format": state_format,
        "host_weights": host_weights,
        "gpu_state_bytes": PLACEMENTS[placement],
    }
    for load in (lambda o: load_weights(o, weights.items()), lambda o: read_weights(o, entries)):
        optimizer = make_optimizer(make_parameters(dtype, device, WIDE).items(), **options)
        load(optimizer)
        for name, state in optimizer.states.items():
            own = state.weight.detach().flatten().cpu()
            kept = {key: tensor.cpu() for key, tensor in state.tensors.items()}
            assert torch.equal(
                state.format.read(kept, own)["master"], weights[name].flatten().cpu()
            )
            assert torch.equal(own, weights[name].flatten().cpu().to(dtype))


@PLACEMENT
def test_gradients_of_bf16_parameters_accumulate_in_float32_and_are_freed(placement, device):
    parameters = make_parameters(torch.bfloat16, device)
    optimizer = make_optimizer(parameters, gpu_state_bytes=PLACEMENTS[placement])
    total = {n: torch.zeros(p.shape, device=device) for n, p in parameters.items()}
    for seed in range(64):  # 64 sums would lose bits in bf16
        for n, gradient in backward(parameters, seed).items():
            total[n] += gradient.float()
    [norm] = optimizer.clip_grad_norm(1.0)  # waits for the copies, too
    assert norm == pytest.approx(
        math.sqrt(sum(t.double().square().sum() for t in total.values())), rel=1e-5
    )
    for n, parameter in parameters.items():
        assert parameter.grad is None
        assert torch.equal(optimizer.states[n].gradient.to(device), total[n].flatten())


@PLACEMENT
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm_before_anything_moves(
    placement, value, device
):
    parameters = make_parameters(torch.bfloat16, device)
    optimizer = make_optimizer(parameters, accumulate=False, gpu_state_bytes=PLACEMENTS[placement])
    before, weights = (
        copy_of_state(optimizer),
        {n: p.detach().clone() for n, p in parameters.items()},
    )
    (parameters["matrix"][7, 15] * value + parameters["other"].sum()).backward()
    assert not math.isfinite(optimizer.clip_grad_norm(1.0)[0])
    assert_equal_states(copy_of_state(optimizer), before)
    assert all(torch.equal(parameters[n], weight) for n, weight in weights.items())


@MICRO_BATCHES
@PLACEMENT
def test_gradients_of_a_backward_that_failed_can_be_dropped(micro_batches, placement, device):
    """The next update equals an update without that backward."""

    def updated(fails):
        parameters = make_parameters(torch.bfloat16, device)
        accumulate = micro_batches > 1
        optimizer = make_optimizer(
            parameters, accumulate=accumulate, gpu_state_bytes=PLACEMENTS[placement]
        )
        if fails:
            handle = parameters["other"].register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backward(parameters, seed=7)
            handle.remove()
            optimizer.zero_grad()
        for micro in range(micro_batches):
            backward(parameters, seed=micro)
        [norm] = optimizer.clip_grad_norm(1.0)
        optimizer.step(1e-2)
        return norm, copy_of_state(optimizer)

    (norm, state), (expected_norm, expected) = updated(True), updated(False)
    assert norm == expected_norm
    assert_equal_states(state, expected)


@PLACEMENT
def test_a_parameter_without_gradient_stays(placement, device):
    parameters = make_parameters(torch.bfloat16, device)
    optimizer = make_optimizer(parameters, gpu_state_bytes=PLACEMENTS[placement])
    backward(parameters, 0)
    optimizer.step(1e-2)
    before = {n: p.detach().clone() for n, p in parameters.items()}
    parameters["other"].sum().backward()
    assert optimizer.clip_grad_norm(1.0)[0] == pytest.approx(math.sqrt(35))
    optimizer.step(1e-2)
    assert [n for n in SHAPES if not torch.equal(parameters[n], before[n])] == ["other"]


def test_a_second_gradient_needs_accumulate(device):
    parameters = make_parameters(torch.bfloat16, device)
    _ = make_optimizer(parameters, accumulate=False)  # its hooks stay as long as it does
    backward(parameters, 0)
    with pytest.raises(AssertionError, match="accumulate must be True"):
        backward(parameters, 1)


def test_checkpoint_holds_each_tensor_not_the_whole_arena(tmp_path, device):
    parameters = make_parameters(torch.bfloat16, device, {str(i): (64, 64) for i in range(16)})
    state = make_optimizer(parameters, gpu_state_bytes=0).state_dict()
    assert (save_state(tmp_path, 1, state) / OPTIMIZER).stat().st_size < 1.5 * 16 * 64 * 64 * 12


@DTYPES
def test_compact_masters_stay_near_float32s(dtype, device):
    """The first update is the same up to rounding: it comes before any moment is rounded."""
    for steps, tolerance in ((1, 1e-6), (20, 2e-3)):  # each step moves a weight by about 1e-2
        parameters, theirs = (make_parameters(dtype, device, WIDE) for _ in range(2))
        optimizer = make_optimizer(parameters, state_format="compact")
        float32 = make_optimizer(theirs)
        for step in range(steps):
            backward(parameters, step), backward(theirs, step)
            optimizer.step(1e-2), float32.step(1e-2)
        for name, state in optimizer.states.items():
            found = state.format.read(state.tensors, parameters[name].detach().flatten())["master"]
            expected = float32.state_dict()[name]["master"].detach().flatten()
            assert (found - expected).abs().mean() < tolerance
            assert name != "norm.weight" or torch.equal(found, expected)


@PLACEMENT
@pytest.mark.parametrize("impl", ["torch", "auto", "triton"])
def test_impl_reaches_the_update(impl, placement, device, monkeypatch):
    seen, update = [], training.optim.formats.compact_adamw
    record = lambda *tensors, **options: seen.append(options["impl"]) or update(*tensors, **options)  # noqa: E731
    monkeypatch.setattr(training.optim.formats, "compact_adamw", record)
    parameters = make_parameters(torch.bfloat16, device, WIDE)
    arguments = {"gpu_state_bytes": PLACEMENTS[placement], "state_format": "compact"}
    optimizer = make_optimizer(parameters, impl=impl, **arguments)
    backward(parameters, 0)
    optimizer.step(1e-2)
    on_triton = impl == "triton" or (impl == "auto" and device.type == "cuda")
    assert seen == [impl] * (
        1 if on_triton and placement == "device" else 12
    )  # pieces of the matrix


@DTYPES
@MICRO_BATCHES
@pytest.mark.parametrize("state_format", ["float32", "compact"])
def test_small_parameters_are_updated_together(
    dtype, micro_batches, state_format, device, monkeypatch
):
    """Bit for bit as one by one, in a launch for matrices, which decay, and one for vectors."""
    shapes = {f"{i}.norm.weight": (5,) for i in range(4)} | {
        f"{i}.matrix": (3, 32) for i in range(3)
    }
    shapes = dict(sorted(shapes.items())) | {"large": (9, 32)}
    calls, update = [], training.optim.formats.adamw
    record = lambda tensors, *given, **options: (  # noqa: E731
        calls.append(len(tensors)) or update(tensors, *given, **options)
    )
    monkeypatch.setattr(training.optim.formats, "adamw", record)
    runs = []
    for small in (0, 96):
        monkeypatch.setattr(training.optim.adamw, "SMALL_ELEMENTS", small)
        calls.clear()
        options = {"steps": 2, "state_format": state_format, "impl": "triton"}
        runs.append(run(make_parameters(dtype, device, shapes), "device", micro_batches, **options))
        expected = [1] * 4 + [1, 1, 1, 1] * (state_format == "float32")
        assert sorted(calls) == sorted(
            2 * (([4] + [1, 3] * (state_format == "float32")) if small else expected)
        )
    assert_equal_runs(*runs)


@PLACEMENT
def test_an_optimizer_no_longer_used_is_freed(placement):
    parameters = make_parameters(torch.bfloat16, "cpu")
    optimizer = make_optimizer(parameters, gpu_state_bytes=PLACEMENTS[placement])
    parts = [nn.ParameterList([parameter]) for parameter in parameters.values()]
    optimizer.update_beside_forward(parts)
    backward(parameters, 0)
    optimizer.step(1e-2)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert not any(part._forward_pre_hooks for part in parts)
    backward(parameters, 1)
    assert all(p.grad is not None for p in parameters.values())  # its hooks are gone, too


GPU_SHAPES = {
    "embedding": (5001, 4096),
    "norm.weight": (4096,),
    "matrix": (4096, 4099),
    "small": (3, 5),
}
GPU_SHARE = pytest.mark.parametrize(
    "share", [0, 0.5]
)  # share of the state on the GPU: all but the largest parameter


def delay_streams(optimizer):
    """Hold up one stream after the other around each piece, so that a missing wait shows."""
    streams = [
        torch.cuda.current_stream(),
        optimizer.ring.inward,
        optimizer.ring.updating,
        optimizer.ring.outward,
    ]
    calls = 0

    def delayed(function):
        def call(*arguments):
            nonlocal calls
            calls += 1
            with torch.cuda.stream(streams[calls % 4]):
                torch.cuda._sleep(10_000_000)  # about 5 ms, longer than any copy of a piece
            function(*arguments)
            with torch.cuda.stream(streams[calls // 4 % 4]):
                torch.cuda._sleep(10_000_000)

        return call

    optimizer._update = delayed(optimizer._update)
    optimizer.ring.send_gradient = delayed(optimizer.ring.send_gradient)


@pytest.mark.gpu
@MICRO_BATCHES
@GPU_SHARE
@STATE_FORMAT
@pytest.mark.parametrize("host_weights", [[], ["matrix", "norm.weight"]], ids=["gpu", "host"])
def test_placements_agree_bit_for_bit_whatever_stream_is_late(
    micro_batches, share, state_format, host_weights
):
    """Parameters of several pieces of full size, so that the slots are used again within a step."""
    parameters = make_parameters(torch.bfloat16, "cuda", GPU_SHAPES)
    expected = run(parameters, "device", micro_batches, state_format=state_format)
    for prepare in (None, delay_streams):
        parameters = make_parameters(torch.bfloat16, "cuda", GPU_SHAPES)
        gpu_state_bytes = (
            share * Inventory.of(parameters.items(), state_format=state_format).gpu_state
        )
        options = {"prepare": prepare, "state_format": state_format, "host_weights": host_weights}
        assert_equal_runs(run(parameters, gpu_state_bytes, micro_batches, **options), expected)


def memory_in_use(device):
    """((bytes asked of the GPU's allocator, tensors of Python), (bytes it reserved, bytes of the
    process))."""
    free_memory()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu":
        return (0, tensors), (0, resident)
    torch.cuda.synchronize()
    torch.empty(
        1, device=device
    )  # lets the allocator see which memory lent to other streams is back
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return (requested, tensors), (torch.cuda.memory_reserved(), resident)


@pytest.mark.parametrize(
    "device, shapes", [("cpu", SHAPES), pytest.param("cuda", GPU_SHAPES, marks=pytest.mark.gpu)]
)
@MICRO_BATCHES
@GPU_SHARE
def test_no_growth_over_50_steps(device, shapes, micro_batches, share):
    parameters = make_parameters(torch.bfloat16, device, shapes)
    gpu_state_bytes = share * Inventory.of(parameters.items()).gpu_state
    optimizer = make_optimizer(
        parameters, accumulate=micro_batches > 1, gpu_state_bytes=gpu_state_bytes
    )
    for step in range(50):
        for micro in range(micro_batches):
            backward(parameters, seed=micro)
        optimizer.clip_grad_norm(1.0)
        optimizer.step(1e-3)
        if step == 9:
            exact, rough = memory_in_use(device)
    exact_after, rough_after = memory_in_use(device)
    assert exact_after == exact
    # Less than three of the gradients that leave in each step.
    assert all(after - before < 2**27 for before, after in zip(rough, rough_after))


@pytest.mark.parametrize("on_gpu", [0, 2])
def test_the_next_forward_waits_for_updates_on_the_host(on_gpu):
    """Each part, before it runs, for its own parameters and for the next part's; the last one for
    all, with the head.

    Weights, and state, are asked for only after the update.
    """
    parts, head, seen = (
        [nn.Linear(32, 32, bias=False) for _ in range(4)],
        nn.Linear(32, 32, bias=False),
        [],
    )
    model = nn.Sequential(*parts, head)
    optimizer = make_optimizer(model.named_parameters(), gpu_state_bytes=on_gpu * 32 * 32 * 8)
    optimizer.update_beside_forward(parts)

    def num_late():
        return len({id(state) for state, _, _ in optimizer.late})

    for number, (part, state) in enumerate(zip([*parts, head], optimizer.states.values())):
        assert state.row.state_on_host == (number >= on_gpu)
        if state.row.state_on_host:
            state.updated.wait = lambda number=number: seen.append(f"updated {number}")
        part.register_forward_hook(lambda *_, number=number: seen.append((number, num_late())))
    for _ in range(2):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step(1e-2)
    expected = []
    for number in range(4):
        expected += [f"updated {number + 1}"] if on_gpu <= number + 1 and number < 3 else []
        expected.append((number, 3 - number))
    late = [each if isinstance(each, str) else (each[0], 0) for each in [*expected, (4, 0)]]
    assert seen == [*late, *expected, (4, 0)] and num_late() == 5 - on_gpu
    before = parts[3].weight.clone()
    assert not torch.equal(optimizer.weights()["3.weight"], before) and not optimizer.late


@MICRO_BATCHES
@GPU_SHARE
def test_updates_beside_the_next_forward_are_the_same(micro_batches, share, monkeypatch):
    """Over steps of unlike batches, passes and an update that break off in the middle, and saved
    state in between."""
    results = []
    for is_late in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        needed = Inventory.of(model.named_parameters()).gpu_state
        optimizer = make_optimizer(
            model.named_parameters(), accumulate=micro_batches > 1, gpu_state_bytes=share * needed
        )
        if is_late:
            optimizer.update_beside_forward([*model][:3])
        for rows in (5, 1, 40, 3):
            for _ in range(micro_batches):
                model(torch.randn(rows, 32)).square().sum().backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step(1e-2)
            if rows == 1:
                model[0](torch.ones(1, 32))  # a pass that broke off
                optimizer.zero_grad()
            if rows == 40:
                if optimizer.late:  # in the middle of the first parameter
                    updates = iter([optimizer._update] * 2)
                    with monkeypatch.context() as patch, pytest.raises(StopIteration):
                        patch.setattr(
                            optimizer,
                            "_update",
                            lambda *piece, updates=updates: next(updates)(*piece),
                        )
                        optimizer.end_update()
                results.append(
                    {n: t.clone() for n, s in optimizer.state_dict().items() for n, t in s.items()}
                )
        results.append({name: weight.clone() for name, weight in optimizer.weights().items()})
    for now, late in zip(results[:2], results[2:]):
        assert all(torch.equal(now[name], late[name]) for name in now)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0, 0.5, 1])
@STATE_FORMAT
@pytest.mark.parametrize("host_weights", [[], ["matrix", "norm.weight"]], ids=["gpu", "host"])
def test_gpu_memory_is_as_predicted(share, state_format, host_weights):
    parameters = make_parameters(torch.bfloat16, "cuda", GPU_SHAPES)
    gpu_state_bytes = share * Inventory.of(parameters.items(), state_format=state_format).gpu_state
    arguments = {
        "accumulate": False,
        "gpu_state_bytes": gpu_state_bytes,
        "state_format": state_format,
    }
    arguments["host_weights"] = host_weights
    predicted = Inventory.of(parameters.items(), **arguments)
    (before, _), _ = memory_in_use("cuda")
    before -= sum(parameters[name].nbytes for name in host_weights)
    optimizer = make_optimizer(parameters, **arguments)
    (held, _), _ = memory_in_use("cuda")
    assert held - before == pytest.approx(predicted.gpu_state + predicted.gpu_scratch, abs=4096)
    backward(parameters, 0, optimizer.homes)
    (with_gradients, _), _ = memory_in_use("cuda")
    leaving = min(
        predicted.leaving_gradients, LEAVING_BYTES
    )  # released when more come, or in the update
    assert with_gradients - held == pytest.approx(predicted.gpu_gradients + leaving, abs=4096)
    optimizer.update_beside_forward([nn.Identity()])  # keeps slots
    optimizer.step(1e-3)
    (with_slots, _), _ = memory_in_use("cuda")
    assert with_slots - held == pytest.approx(predicted.gpu_slots, abs=4096)
    optimizer.weights()
    (after, _), _ = memory_in_use("cuda")
    assert after == held


def test_learning_rate_schedule():
    rates = [
        warmup_cosine(s, learning_rate=1.0, warmup_steps=4, max_steps=11, final_ratio=0.1)
        for s in range(11)
    ]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1) and rates == [
        *rates[:4],
        *sorted(rates[4:], reverse=True),
    ]
    assert rates[7] == pytest.approx(0.1 + 0.9 * 0.5)
    assert warmup_cosine(0, learning_rate=1.0, warmup_steps=0, max_steps=1, final_ratio=0.1) == 1.0
