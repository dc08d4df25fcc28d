import functools

import pytest
import torch

from kernels.gated_delta_net import (
    DeltaNet,
    DeltaNetParameters,
    StateCache,
    gated_delta_net,
    gated_delta_net_reference,
)
from kernels.lora import LORA
from kernels.parts import Adapted
from tests.kernels.attention.inputs import segments_of_groups
from tests.kernels.compare import outputs_and_gradients, random

D = 24
KINDS = [DeltaNet(1, 1, 16, 16), DeltaNet(2, 4, 16, 32), DeltaNet(1, 3, 32, 16)]
LENGTHS = [[1], [3], [65], [3, 64, 1, 2, 17, 5]]
CASES = [(kind, lengths, "torch") for kind in KINDS for lengths in LENGTHS]
# The interpreter takes seconds for a few heads and chunks. test_delta_net.py and
# test_convolution.py vary each kernel.
CASES += [(KINDS[0], lengths, "triton") for lengths in ([1], LENGTHS[-1])]
CASES += [(KINDS[1], [3, 1, 5], "triton"), (KINDS[2], [65], "triton")]


def parameters_of(kind):
    _, H, _, V = kind.sizes
    shapes = [
        (kind.channels, D),
        (H * V, D),
        (H, D),
        (H, D),
        (kind.channels, 4),
        (H,),
        (H,),
        (V,),
        (D, H * V),
    ]
    return [random(*shape, seed=i) * shape[-1] ** -0.5 for i, shape in enumerate(shapes)]


def compare(reference, function, inputs):
    """Compares outputs and gradients with float64, within 1e-5 of the norm: a state sums over all
    of a document."""
    exact = outputs_and_gradients(
        lambda *tensors: reference(*(t.double() for t in tensors)), inputs
    )
    for e, found in zip(exact, outputs_and_gradients(function, inputs)):
        assert (found.double() - e).norm() <= 1e-5 * e.norm() + 1e-7


def call(function, kind, **options):
    return lambda x, *tensors: function(x, DeltaNetParameters(*tensors, 1e-6), kind, **options)


def segments_of(lengths):
    stops = torch.tensor(lengths).cumsum(0)
    return torch.stack([torch.zeros_like(stops), stops - torch.tensor(lengths), stops], dim=1)


@pytest.mark.parametrize(("kind", "lengths", "impl"), CASES, ids=str)
def test_matches_float64(kind, lengths, impl, device, poisoned_memory):
    segments = segments_of(lengths)
    plain, ours = (
        call(gated_delta_net_reference, kind, segments=segments),
        call(gated_delta_net, kind, segments=segments, impl=impl),
    )
    compare(plain, ours, [random(1, sum(lengths), D), *parameters_of(kind)])


@pytest.mark.parametrize(
    ("impl", "groups"),
    [
        ("torch", [(70, 3, 1, 66), (2, 5), (1, 1, 1), (4,)]),
        ("torch", [(5, 2)]),
        ("triton", [(66, 2, 1), (2, 3)]),
    ],
)
def test_answers_start_from_their_prompts_state(impl, groups, device):
    """Compares with the reference on the same documents one by one, each after a copy of its
    prompt."""
    kind, segments = KINDS[0 if impl == "triton" else 1], segments_of_groups(groups)
    rows, lengths, own = [], [], []
    for _, start, stop, first, last in segments.tolist():
        own += [sum(lengths) + last - first + i for i in range(stop - start)]
        rows += [*range(first, last), *range(start, stop)]
        lengths.append(last - first + stop - start)
    separate = call(gated_delta_net_reference, kind, segments=segments_of(lengths))
    shared = call(gated_delta_net, kind, segments=segments, impl=impl)
    inputs = [random(1, int(segments[-1, 2]), D), *parameters_of(kind)]
    compare(lambda x, *tensors: separate(x[:, rows], *tensors)[:, own], shared, inputs)


def test_matches_transformers(device):
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers import Qwen3_5TextConfig

    for kind in KINDS:
        G, H, K, V = kind.sizes
        config = Qwen3_5TextConfig(
            hidden_size=D, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K,
            linear_value_head_dim=V, num_hidden_layers=1, layer_types=["linear_attention"],
        )  # fmt: skip
        theirs, (x, *tensors) = (
            qwen.Qwen3_5GatedDeltaNet(config, 0),
            [random(2, 70, D), *parameters_of(kind)],
        )
        names = (
            *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")), "conv1d", "A_log", "dt_bias",
            "norm", "out_proj",
        )  # fmt: skip
        with torch.no_grad():
            for name, tensor in zip(names, tensors):
                own = getattr(theirs, name)
                (own if isinstance(own, torch.nn.Parameter) else own.weight).view(
                    tensor.shape
                ).copy_(tensor)
        expected = theirs.to(x.device)(x)
        torch.testing.assert_close(
            call(gated_delta_net, kind)(x, *tensors), expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("cuts", [[1, 1, 1, 1, 1], [64, 1, 1], [3, 2, 60, 1], [2, 1]], ids=str)
def test_a_cache_goes_on_where_it_was(cuts, device):
    kind, cache = KINDS[1], StateCache()
    x, tensors = random(2, sum(cuts), D), parameters_of(kind)
    whole = call(gated_delta_net, kind)(x, *tensors)
    parts = [call(gated_delta_net, kind, cache=cache)(part, *tensors) for part in x.split(cuts, 1)]
    assert cache.length == sum(cuts)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_adapted_projections(device):
    """An adapter adds B A to its matrix, and takes the gradients of that."""
    kind, x, tensors = KINDS[1], random(1, 9, D), parameters_of(KINDS[1])
    a, b = random(2, D, seed=20), random(kind.channels, 2, seed=21) / 8

    def adapted(x, a, b):
        return call(gated_delta_net, kind, linear=LORA)(x, Adapted(tensors[0], a, b), *tensors[1:])

    def merged(x, a, b):
        qkv, *others = (tensor.to(x.dtype) for tensor in tensors)
        return call(gated_delta_net_reference, kind)(x, qkv + b @ a, *others)

    compare(merged, adapted, [x, a, b])


def test_refused():
    with pytest.raises(
        ValueError, match=r"linear_num_value_heads must be a multiple .* \(2\), got 3"
    ):
        DeltaNet(2, 3)
    with pytest.raises(ValueError, match="heads and widths above 0"):
        DeltaNet(0, 3)


def test_flops_are_of_each_token():
    kind = DeltaNet().kind
    short, long = (functools.partial(kind.flops, H=1, G=1, K=1)(n) for n in (100, 1000))
    assert long.forward == 10 * short.forward and long.backward > long.forward and not long.choice
