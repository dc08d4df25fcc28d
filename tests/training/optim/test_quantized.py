"""Quantized matrices against the definition of their formats, and as an optimizer keeps, reads and
lends them."""

import importlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kernels.parts import Parameter
from tests.optimizers import make_optimizer
from tests.packages import needs
from training.checkpoint.pieces import read_entries, read_header
from training.checkpoint.state import load_weights, read_weights
from training.host.errors import UserError
from training.host.memory import SLOT_ALIGNMENT
from training.memory.visiting import VisitingWeights
from training.optim import quantized
from training.optim.formats import QuantizedState, frozen_format
from training.optim.inventory import Inventory
from training.optim.quantized import GROUP, Quantized, check_library, quantize

pytestmark = needs("bitsandbytes", "0.50")
# NF4's values, the quantiles of a normal distribution: QLoRA, appendix E.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
SHAPES = {"layers.0.first": (96, 64), "bias": (96,), "layers.1.second": (32, 192)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(quantized, shape, dtype=torch.float32, device="cpu"):
    matrix = torch.full(shape, float("nan"), dtype=dtype, device=device)
    quantized.write_into(matrix)
    return matrix


@pytest.mark.parametrize("device", DEVICES)
def test_4_bits_are_the_nearest_value_of_nf4(device):
    elements = drawn(40 * GROUP) * torch.logspace(-3, 3, 40).repeat_interleave(GROUP)
    quantized = quantize(elements.to(device), 4)
    groups = elements.view(-1, GROUP)
    scales = groups.abs().amax(1, keepdim=True)
    torch.testing.assert_close(quantized.scales.cpu(), scales.flatten(), rtol=0, atol=0)
    found = written(quantized, groups.shape, device=device).cpu() / scales
    distance = (groups / scales)[..., None] - NF4
    torch.testing.assert_close(
        (groups / scales - found).abs(), distance.abs().amin(-1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.095)])
def test_errors_are_as_small_as_the_bits_allow(bits, error, device):
    elements = drawn(1000 * GROUP).to(device)
    for dtype, rounding in ((torch.float32, 0), (torch.bfloat16, 2**-9)):
        found = written(quantize(elements, bits), elements.shape, dtype, device).float()
        assert 0.9 * error < (found - elements).norm() / elements.norm() < 1.05 * error + rounding
    assert quantize(elements, bits).nbytes == elements.numel() * bits // 8 + 4 * 1000


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_groups_do_not_mix(bits):
    elements = torch.cat([torch.zeros(GROUP), drawn(GROUP), torch.zeros(GROUP)])
    found = written(quantize(elements, bits), elements.shape).view(3, GROUP)
    assert not found[::2].any() and found[1].any()
    alone = quantize(elements[GROUP : 2 * GROUP], bits)
    torch.testing.assert_close(written(alone, (GROUP,)), found[1], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("on_host", [False, True])
def test_an_optimizer_keeps_reads_and_lends_them(bits, on_host, device, tmp_path):
    """Checks weights from memory, from tensors and from files, unlike ones in a row, visit by
    visit."""
    weights = {
        name: drawn(*shape, seed=i).bfloat16() for i, (name, shape) in enumerate(SHAPES.items())
    }
    parameters = {
        n: nn.Parameter(w.to(device, copy=True), requires_grad=n == "bias")
        for n, w in weights.items()
    }
    matrices = [parameters["layers.0.first"], parameters["layers.1.second"]]
    blocks = {"layers.0.first": 0, "layers.1.second": 1}
    options = {
        "frozen": frozen_format(bits), "host_weights": [*parameters] if on_host else (),
        "declared": {name: Parameter(shape, block=blocks.get(name)) for name, shape in SHAPES.items()},
    }  # fmt: skip
    predicted = Inventory.of(parameters.items(), accumulate=False, **options)
    optimizer = make_optimizer(parameters, accumulate=False, **options)
    assert not any(matrix.untyped_storage().nbytes() for matrix in matrices)
    homes = [optimizer.homes[matrix] for matrix in matrices]
    assert all(isinstance(home, Quantized) for home in homes)
    kept = sum(home.nbytes for home in homes)
    assert predicted.gpu_state == 0 if on_host else predicted.gpu_state == 12 * 96
    assert predicted.host >= kept if on_host else predicted.host == 0
    assert predicted.updated == (
        5 * SLOT_ALIGNMENT if on_host else 0
    )  # the bias with its gradient and state
    of_blocks = dict(zip(matrices[:1], homes)), dict(zip(matrices[1:], homes[1:]))
    visiting = VisitingWeights(dict(enumerate(of_blocks)), torch.device(device))

    def check(expected):
        for block, name in enumerate(("layers.0.first", "layers.1.second")):
            with visiting.visit(block, block + 1), torch.no_grad():
                exact = written(
                    quantize(expected[name].float().to(device), bits),
                    SHAPES[name],
                    torch.bfloat16,
                    device,
                )
                torch.testing.assert_close(
                    parameters[name], nn.Parameter(exact, requires_grad=False), rtol=0, atol=0
                )
        visiting.free()
        assert not any(matrix.untyped_storage().nbytes() for matrix in matrices)

    check(weights)
    others = {name: 3 * weight for name, weight in weights.items()}
    load_weights(optimizer, others.items())
    check(others)
    save_file(weights, tmp_path / "weights.safetensors")
    read_weights(
        optimizer,
        read_entries(
            read_header(tmp_path / "weights.safetensors"), tmp_path / "weights.safetensors"
        ),
    )
    check(weights)
    assert optimizer.weights().keys() == optimizer.state_dict().keys() == {"bias"}


@pytest.mark.parametrize("bits", [8, 4])
def test_the_format_counts_what_it_writes(bits):
    format = QuantizedState(torch.bfloat16, bits)
    state = {
        name: torch.empty(640 // kept.group, dtype=kept.dtype) for name, kept in format.kept.items()
    }
    format.write(state, torch.empty(640, device="meta"), {"master": drawn(640)})
    found = written(format.weight(state), (640,))
    torch.testing.assert_close(found, written(quantize(drawn(640), bits), (640,)), rtol=0, atol=0)
    assert (
        format.num_bytes(640)
        == sum(tensor.nbytes for tensor in state.values())
        == 640 * bits // 8 + 40
    )
    assert format.group == GROUP


def test_a_library_that_does_not_fit_is_refused(monkeypatch):
    check_library("lora_bits 4")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.49.2")
    with pytest.raises(
        UserError,
        match=r"lora_bits 4 needs bitsandbytes 0\.50 or newer, got 0.*/python -m pip install -U",
    ):
        check_library("lora_bits 4")
    monkeypatch.undo()
    monkeypatch.setattr(quantized, "_library", lambda: importlib.import_module("no_such_library"))
    with pytest.raises(
        UserError, match=r"needs bitsandbytes, and .* fails here: No module named 'no_such_library'"
    ):
        check_library("lora_bits 4")
