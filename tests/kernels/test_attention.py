import importlib
import itertools

import pytest
import torch

from kernels.attention import attention, attention_reference, choose_backend


def make_qkv(B, T, H, G, K, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, heads, K, generator=generator).to(device, dtype).requires_grad_() for heads in (H, G, G)]


def segments_of(lengths_by_row):
    rows = []
    for row, lengths in enumerate(lengths_by_row):
        ends = list(itertools.accumulate(lengths))
        rows += [(row, end - length, end) for length, end in zip(lengths, ends)]
    return torch.tensor(rows)


def outputs_and_gradients(function, inputs, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("lengths", [None, [[37, 1, 62], [100]], [[50, 50], [99, 1]]])
@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (6, 1)])
def test_matches_float64_within_documents(H, G, lengths, device):
    segments = None if lengths is None else segments_of(lengths)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = make_qkv(2, 100, H, G, 64, dtype, device)
    exact = outputs_and_gradients(lambda *x: attention_reference(*x, segments), inputs, torch.float64)
    plain = outputs_and_gradients(lambda *x: attention_reference(*x, segments), inputs, dtype)
    ours = outputs_and_gradients(lambda *x: attention(*x, segments), inputs, dtype)
    for name, e, p, o in zip(("out", "dq", "dk", "dv"), exact, plain, ours):
        error, allowed = (o - e).abs().max().item(), 3 * (p - e).abs().max().item() + 1e-6
        assert error <= allowed, f"{name}: error {error}, the same-dtype PyTorch path's x 3 is {allowed}"


@pytest.mark.parametrize("copied", [0, 10**6])
def test_windows_of_rounded_lengths(copied, monkeypatch):
    """Windows of multiples of 16 tokens run into the next document and, where they are copied, past the row."""
    module, segments = importlib.import_module("kernels.attention"), segments_of([[37, 1, 62], [3, 97]])
    inputs = make_qkv(2, 100, 4, 2, 64, torch.float32, torch.device("cpu"))
    expected = outputs_and_gradients(lambda *x: attention(*x, segments), inputs, torch.float32)
    lengths = set()
    kernel = module.KERNELS["cpu"]

    def forward(q, k, v):
        lengths.add(q.shape[1])
        return kernel.forward(q, k, v)

    monkeypatch.setitem(module.KERNELS, "cpu", kernel._replace(forward=forward, length_multiple=16))
    monkeypatch.setattr(module, "_LONGEST_COPIED", copied)
    found = outputs_and_gradients(lambda *x: attention(*x, segments), inputs, torch.float32)
    for e, o in zip(expected, found):
        torch.testing.assert_close(o, e, rtol=1e-5, atol=1e-5)
    assert lengths == ({48, 16, 64, 112} if copied else {48, 16, 62, 97})


def test_a_document_never_sees_another(device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = make_qkv(1, 64, 4, 2, 32, dtype, device)
    segments = segments_of([[20, 44]])
    before = attention(q, k, v, segments)
    with torch.no_grad():
        k[:, :20] += 1
        v[:, :20] += 1
    after = attention(q, k, v, segments)
    assert torch.equal(before[:, 20:], after[:, 20:])
    assert not torch.equal(before[:, :20], after[:, :20])


def test_custom_ops_and_compile(device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = make_qkv(2, 32, 4, 2, 32, dtype, device)
    segments, backend = segments_of([[10, 22], [32]]), choose_backend("auto", device)
    # CPU attention is not bitwise between strides, and opcheck's tolerances do not know bf16.
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.fathom.attention_forward, (q, k, v, segments, backend), test_utils=utils)
    compiled = torch.compile(lambda *x: attention(*x, segments), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attention(q, k, v, segments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :5], v), "got \\(1, 8, 4, 32\\), \\(1, 5"),
        (lambda q, k, v: (q[:, :, :3], k, v), "multiple of G"),
    ],
)
def test_refuses_what_no_kernel_takes(change, message, device):
    with pytest.raises(ValueError, match=message):
        attention(*change(*make_qkv(1, 8, 4, 2, 32, torch.float32, device)))


def test_backend_choice_is_explicit():
    assert choose_backend("auto", torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="needs a CUDA device"):
        choose_backend("cudnn", torch.device("cpu"))
    with pytest.raises(ValueError, match="must be one of"):
        choose_backend("cuddn", torch.device("cpu"))


def test_backend_follows_the_compute_capability(monkeypatch):
    """A GPU that is not here: what the driver would say of it is all that is asked."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for capability, chosen in (((8, 0), "flash"), ((8, 9), "flash"), ((9, 0), "cudnn"), ((12, 0), "cudnn")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert choose_backend("auto", gpu) == chosen
        assert choose_backend("flash", gpu) == "flash"
    for capability in ((7, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for requested in ("auto", "flash", "cudnn", "flash-attn-4"):
            with pytest.raises(ValueError, match=f"capability 8.0 .*has {capability[0]}.{capability[1]}; use"):
                choose_backend(requested, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("lengths", [None, [[1500, 3, 1569], [3072]]])
def test_gpu_backends_match_float64(backend, lengths, device):
    """3072 tokens: documents whose rounded-up windows run into their neighbours and past the end."""
    segments = None if lengths is None else segments_of(lengths)
    inputs = make_qkv(2, 3072, 4, 2, 128, torch.bfloat16, device)
    exact = outputs_and_gradients(lambda *x: attention_reference(*x, segments), inputs, torch.float64)
    plain = outputs_and_gradients(lambda *x: attention_reference(*x, segments), inputs, torch.bfloat16)
    ours = outputs_and_gradients(lambda *x: attention(*x, segments, backend=backend), inputs, torch.bfloat16)
    for name, e, p, o in zip(("out", "dq", "dk", "dv"), exact, plain, ours):
        error, allowed = (o - e).norm().item(), 2 * (p - e).norm().item()
        assert error <= allowed, f"{name}: error {error}, the same-dtype PyTorch path's x 2 is {allowed}"
