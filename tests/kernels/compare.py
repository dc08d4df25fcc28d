"""What the tests of several kernels share: seeded inputs, and the comparison with float64."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # for hypothesis, which takes no fixtures


def random(*shape, seed=0, dtype=torch.float32, device=DEVICE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


STRIDES = ("contiguous", "every other", "column", "reversed dimensions", "expanded")


def strided(x, strides):
    """The values of `x` in memory laid out otherwise; "expanded" repeats the first value, at stride 0."""
    if strides == "every other":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if strides == "column":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if strides == "reversed dimensions":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    return x.flatten()[0].expand(x.shape) if strides == "expanded" else x


def outputs_and_gradients(function, inputs):
    """What `function` returns, and the gradient of every input against random gradients of every output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    arriving = [random(*out.shape, seed=1 + i, dtype=out.dtype, device=out.device) for i, out in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, arriving)]


def compare_with_float64(reference, function, inputs, units=0.5):
    """Every output and gradient of `function` is no further from float64 than twice `reference` in the same dtype is.

    And half a unit in the last place (`units`), which the reference may luckily do without in a tensor of few elements.
    Triton's interpreter truncates to bfloat16 where a GPU rounds to nearest: there it may be two units.
    """
    exact = outputs_and_gradients(lambda *tensors: reference(*(t.double() for t in tensors)), inputs)
    plain = outputs_and_gradients(reference, inputs)
    ours = outputs_and_gradients(function, inputs)
    for i, (e, p, o) in enumerate(zip(exact, plain, ours)):
        assert o.dtype == p.dtype and o.shape == p.shape
        error, plain_error = (o.double() - e).abs().max(), (p.double() - e).abs().max()
        more = 2 if o.dtype == torch.bfloat16 and not o.is_cuda else units
        allowed = 2 * plain_error + more * torch.finfo(o.dtype).eps * e.abs().max() + 1e-6
        assert error <= allowed, f"output or gradient {i}: error {error:.3g}, allowed {allowed:.3g}"
