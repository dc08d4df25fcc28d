"""Seeded inputs, the comparison with float64, and a GPU's memory, for the tests of several
kernels."""

import torch

from tests.gpu import free_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device(
    "cuda" if torch.cuda.is_available() else "cpu"
)  # tests by hypothesis take no fixtures


def random(*shape, seed=0, dtype=torch.float32, device=DEVICE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


STRIDES = ("contiguous", "every other", "column", "reversed dimensions", "expanded")


def strided(x, strides):
    """Returns the values of `x` at other strides. "expanded" repeats the first value, at stride
    0."""
    if strides == "every other":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if strides == "column":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if strides == "reversed dimensions":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    return x.flatten()[0].expand(x.shape) if strides == "expanded" else x


def outputs_and_gradients(function, inputs):
    """Returns the outputs of `function`, and every input's gradient for random gradients of the
    outputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    arriving = [
        random(*out.shape, seed=1 + i, dtype=out.dtype, device=out.device)
        for i, out in enumerate(outputs)
    ]
    return [*outputs, *torch.autograd.grad(outputs, inputs, arriving)]


def compare_with_float64(reference, function, inputs, units=0.5):
    """Asserts that outputs and gradients of `function` are near float64: twice the error of
    `reference` is allowed.

    Half a unit in the last place (`units`) is added: the reference may be lucky in a tensor of few
    elements. For bfloat16 on a CPU it is two units, because Triton's interpreter truncates and a
    GPU rounds to nearest.
    """
    exact = outputs_and_gradients(
        lambda *tensors: reference(*(t.double() for t in tensors)), inputs
    )
    plain = outputs_and_gradients(reference, inputs)
    ours = outputs_and_gradients(function, inputs)
    for i, (e, p, o) in enumerate(zip(exact, plain, ours)):
        assert o.dtype == p.dtype and o.shape == p.shape
        error, plain_error = (o.double() - e).abs().max(), (p.double() - e).abs().max()
        more = 2 if o.dtype == torch.bfloat16 and not o.is_cuda else units
        allowed = 2 * plain_error + more * torch.finfo(o.dtype).eps * e.abs().max() + 1e-6
        assert error <= allowed, f"output or gradient {i}: error {error:.3g}, allowed {allowed:.3g}"


def requested_peak(function, *inputs):
    """Returns what `function` returns for `inputs`, and the most bytes that its tensors requested
    of the GPU at once.

    Tensors made before do not count. torch.cuda.max_memory_allocated would count what blocks of the
    cache hold beyond the bytes requested: up to 1 MiB a tensor, which depends on the tests before.
    What is freed within the call would lower the result, so garbage is freed before.
    """
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = function(*inputs)
    return result, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
