import pytest
import torch

from kernels import torch_internals
from kernels.attention import documents, libraries
from kernels.attention import full as module
from kernels.attention.attend import attend_backward, attention
from kernels.attention.documents import document_calls
from kernels.attention.full import (
    FULL,
    attention_reference,
    backward_workspace,
    full_backward,
    full_forward,
)
from kernels.attention.libraries import choose_backend
from tests.kernels.attention.inputs import segments_of
from tests.kernels.compare import requested_peak
from tests.storage_counter import StorageCounter


def make_qkv(B, T, H, G, K, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, T, heads, K, generator=generator).to(device, dtype).requires_grad_()
        for heads in (H, G, G)
    ]


def outputs_and_gradients(function, inputs, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("lengths", [None, [[37, 1, 62], [100]], [[50, 50], [99, 1]]])
@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (6, 1)])
def test_matches_float64_within_documents(H, G, lengths, device):
    segments = None if lengths is None else segments_of(*lengths)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = make_qkv(2, 100, H, G, 64, dtype, device)
    exact = outputs_and_gradients(
        lambda *x: attention_reference(*x, segments), inputs, torch.float64
    )
    plain = outputs_and_gradients(lambda *x: attention_reference(*x, segments), inputs, dtype)
    ours = outputs_and_gradients(lambda *x: attention(*x, segments), inputs, dtype)
    for name, e, p, o in zip(("out", "dq", "dk", "dv"), exact, plain, ours):
        error, allowed = (o - e).abs().max().item(), 3 * (p - e).abs().max().item() + 1e-6
        assert error <= allowed, (
            f"{name}: error {error}, the same-dtype PyTorch path's x 3 is {allowed}"
        )


def attend_as_cudnn(monkeypatch, longest_together, length_step):
    """CPU attention with cuDNN's division into calls. Returns the shapes of q and k that attend
    alone."""
    shapes, kernel = set(), libraries.KERNELS["cpu"]

    def forward(q, k, v):
        shapes.add((q.shape[1], q.shape[2], k.shape[2]))
        return kernel.forward(q, k, v)

    changed = kernel._replace(
        forward=forward, longest_together=longest_together, length_step=length_step
    )
    monkeypatch.setitem(libraries.KERNELS, "cpu", changed)
    return shapes


@pytest.mark.parametrize("copied", [0, 10**6])
@pytest.mark.parametrize("longest_together", [0, 3, 37])
def test_documents_alone_and_together(longest_together, copied, monkeypatch):
    """Windows of rounded lengths run into the next documents and, where they are copied, past the
    batch."""
    segments = segments_of([37, 1, 62], [3, 97])
    inputs = make_qkv(2, 100, 4, 2, 64, torch.float32, torch.device("cpu"))
    expected = outputs_and_gradients(
        lambda *x: attention_reference(*x, segments), inputs, torch.float64
    )
    shapes = attend_as_cudnn(monkeypatch, longest_together, length_step=16)
    monkeypatch.setattr(module, "_LONGEST_COPIED", copied)
    found = outputs_and_gradients(lambda *x: attention(*x, segments), inputs, torch.float32)
    for e, o in zip(expected, found):
        torch.testing.assert_close(o.double(), e, rtol=1e-5, atol=1e-5)
    alone = {0: {48, 16, 64}, 3: {48, 64}, 37: {64}}[longest_together]
    assert shapes == {(length, 4, 2) for length in alone} | {(112, 4, 2) if copied else (112, 2, 1)}


@pytest.mark.parametrize("longest_together", [0, 30, 50])
def test_neighbouring_rows_of_one_document_attend_at_once(longest_together, monkeypatch):
    """Compares with the reference. Rows are not padded to 48 tokens, as shorter documents are."""
    segments = segments_of([37], [37], [37], [20, 17], [37], [31, 6], [37], [37])
    inputs = make_qkv(8, 37, 4, 2, 64, torch.float32, torch.device("cpu"))
    expected = outputs_and_gradients(
        lambda *x: attention_reference(*x, segments), inputs, torch.float64
    )
    shapes, kernel = [], libraries.KERNELS["cpu"]
    forward = lambda q, k, v: shapes.append(q.shape[:2]) or kernel.forward(q, k, v)  # noqa: E731
    changed = kernel._replace(forward=forward, longest_together=longest_together, length_step=16)
    monkeypatch.setitem(libraries.KERNELS, "cpu", changed)
    found = outputs_and_gradients(lambda *x: attention(*x, segments), inputs, torch.float32)
    for e, o in zip(expected, found):
        torch.testing.assert_close(o.double(), e, rtol=1e-5, atol=1e-5)
    parts = {0: [(1, 32), (1, 32), (1, 32), (1, 16)], 30: [(1, 32)], 50: []}[longest_together]
    assert sorted(shapes) == sorted(
        [*parts, *([(3, 37), (1, 37), (2, 37)] if longest_together < 37 else [])]
    )


@pytest.mark.parametrize("longest_together", [0, 20, 100])
def test_a_document_never_sees_another(longest_together, monkeypatch, device):
    """Of three documents and a second row, all but the second document change: neither its output
    nor its gradients."""
    if device.type == "cpu":
        attend_as_cudnn(monkeypatch, longest_together, length_step=16)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    segments, results = segments_of([20, 30, 14], [64]), []
    for change in (0.0, 1.0):
        inputs = [x.detach().clone() for x in make_qkv(2, 64, 4, 2, 32, dtype, device)]
        dout = torch.ones_like(inputs[0])
        for x in (*inputs, dout):
            x[0, :20] += change
            x[0, 50:] *= 1 - 3 * change
            x[1] += change
        inputs = [x.requires_grad_() for x in inputs]
        out = attention(*inputs, segments)
        results.append([out, *torch.autograd.grad(out, inputs, dout)])
    for before, after in zip(*results):
        assert torch.equal(before[0, 20:50], after[0, 20:50])
        assert not any(torch.equal(before[0, i], after[0, i]) for i in (0, 19, 50, 63))


class Recorder:
    """In the place of a library's kernel: makes empty results, and records what its queries
    were."""

    def __init__(self, operation):
        self.operation, self.queries = operation, set()

    def __call__(self, *arguments):
        first = 1 if "grad_out" in str(self.operation.default._schema) else 0
        self.queries |= {(x.shape, x.stride()) for x in arguments[first : first + 2]}
        return self.operation(*arguments)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_gpu_kernels_are_called_with_few_shapes(backend, monkeypatch):
    """On meta tensors: the libraries take these arguments; cuDNN builds plans for these shapes and
    strides alone."""
    (H, G, K), T, recorders = (4, 2, 64), 100_000, {}
    for name in ("cudnn_attention", "cudnn_attention_backward", "varlen_flash_attention_backward"):
        recorders[name] = Recorder(getattr(torch_internals, name))
        monkeypatch.setattr(torch_internals, name, recorders[name])
    for lengths in ([70_100, 2000, 50, 27_850], [2000, 27_850, 50, 70_100], [70_000, 2300, 27_700]):
        q = torch.empty(1, T, H, K, dtype=torch.bfloat16, device="meta")
        kernel = libraries.KERNELS[backend]
        calls = document_calls(q, segments_of(lengths), kernel.longest_together)
        monkeypatch.setattr(module, "document_calls", lambda *_, calls=calls: calls)
        k, v, segments = q[:, :, :G].contiguous(), q[:, :, :G].contiguous(), torch.empty(0)
        out, lse = full_forward(q, k, v, segments, backend)
        assert (
            out.shape == q.shape
            and lse.shape == (1, T, H)
            and out.is_contiguous()
            and lse.is_contiguous()
        )
        gradients = full_backward(q, q, k, v, out, lse, segments, backend)
        assert all(d.shape == x.shape and d.is_contiguous() for d, x in zip(gradients, (q, k, v)))
    if backend == "flash":
        shapes = {shape for shape, _ in recorders["varlen_flash_attention_backward"].queries}
        assert shapes == {
            (n, heads, K) for n in (70_100, 29_900, 70_000, 30_000) for heads in (H, G)
        }
        assert not recorders["cudnn_attention"].queries
        return
    # Windows in place and copies have the same strides. At the end of the batch each key/value head
    # has its own call.
    calls = [*((length, 4, 2) for length in (73_728, 28_672, 2304)), (73_728, 2, 1)]
    expected = {
        ((1, n, length, K), (length * n * K, K, n * K, 1))
        for length, *heads in calls
        for n in heads
    }
    assert (
        recorders["cudnn_attention"].queries
        == recorders["cudnn_attention_backward"].queries
        == expected
    )


def test_refuses_what_no_kernel_takes(device):
    q, k, v = make_qkv(1, 8, 4, 2, 32, torch.float32, device)
    with pytest.raises(ValueError, match="got \\(1, 8, 4, 32\\), \\(1, 5"):
        attention(q, k[:, :5], v)


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
    for capability, chosen in (
        ((8, 0), "flash"),
        ((8, 9), "flash"),
        ((9, 0), "cudnn"),
        ((12, 0), "cudnn"),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert choose_backend("auto", gpu) == chosen
        assert choose_backend("flash", gpu) == "flash"
    for capability in ((7, 0), (7, 5)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        for requested in ("auto", "flash", "cudnn", "flash-attn-4"):
            with pytest.raises(
                ValueError, match=f"capability 8.0 .*has {capability[0]}.{capability[1]}; use"
            ):
                choose_backend(requested, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize(
    "lengths", [None, [[1500, 3, 1569], [3072]], [[2100, 1, 700, 271], [129, 2943]]]
)
def test_gpu_backends_match_float64(backend, lengths, device):
    """3072 tokens: documents whose rounded-up windows run into the next ones and past the end."""
    segments = None if lengths is None else segments_of(*lengths)
    inputs = make_qkv(2, 3072, 4, 2, 128, torch.bfloat16, device)
    exact = outputs_and_gradients(
        lambda *x: attention_reference(*x, segments), inputs, torch.float64
    )
    plain = outputs_and_gradients(
        lambda *x: attention_reference(*x, segments), inputs, torch.bfloat16
    )
    ours = outputs_and_gradients(
        lambda *x: attention(*x, segments, backend=backend), inputs, torch.bfloat16
    )
    for name, e, p, o in zip(("out", "dq", "dk", "dv"), exact, plain, ours):
        error, allowed = (o - e).norm().item(), 2 * (p - e).norm().item()
        assert error <= allowed, (
            f"{name}: error {error}, the same-dtype PyTorch path's x 2 is {allowed}"
        )


@pytest.mark.parametrize("last", [[64], [40, 24]])
def test_rows_at_once_take_what_is_declared(last, monkeypatch):
    """Eight rows, seven of one document each, in a library whose backward takes 4 times q's bytes
    for itself."""

    def backward(dout, q, k, v, *_):
        own = q.new_empty(4, *q.shape)
        return [torch.empty_like(x) for x in (q, k, v)] * own.is_contiguous()

    monkeypatch.setattr(documents, "TOGETHER_TOKENS", 64)
    changed = libraries.KERNELS["cpu"]._replace(
        backward=backward, longest_together=10, workspace_rows=4, expanded_rows=0
    )
    monkeypatch.setitem(libraries.KERNELS, "cpu", changed)
    T = sum(last)
    q, k, v = (x.detach() for x in make_qkv(8, T, 4, 2, 64, torch.float32, torch.device("cpu")))
    segments, longest = (None, None) if len(last) == 1 else (segments_of(*[[T]] * 7, last), T)
    with StorageCounter() as counter:
        counter.known.update(x.untyped_storage() for x in (q, k, v))
        gradients = full_backward(q, q, k, v, q, q[..., 0], segments, "cpu")
    taken = counter.peak - sum(x.nbytes for x in gradients)
    declared = backward_workspace(
        "cpu", 8 * T, q[0, 0].nbytes, k[0, 0].nbytes, T, longest, num_key_value_heads=2
    )
    assert 0.9 * declared < taken <= 1.02 * declared


@pytest.mark.gpu
def test_gpu_long_documents_at_the_end_of_the_batch(device):
    """34,000 tokens and one key/value head at a time, against the same document where nothing is
    copied."""
    q, k, v = make_qkv(1, 36_000, 4, 2, 64, torch.bfloat16, device)
    found = outputs_and_gradients(
        lambda *x: attention(*x, segments_of([2000, 34_000])), (q, k, v), torch.bfloat16
    )
    alone = [x[:, 2000:] for x in (q, k, v)]
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)[:, 2000:]
    inputs = [x.detach().clone().requires_grad_() for x in alone]
    out = attention(*inputs, backend="flash")
    expected = [out, *torch.autograd.grad((out * weights).sum(), inputs)]
    for e, o in zip(expected, found):
        assert (o[:, 2000:] - e).norm() <= 0.01 * e.norm()


@pytest.mark.gpu
def test_gpu_gradients_are_the_same_from_run_to_run(device):
    """Under PyTorch's switch, long and short documents; a new tensor holds NaN there until it is
    written."""
    segments, inputs = (
        segments_of([3000, 500, 1, 571]),
        make_qkv(1, 4072, 8, 2, 128, torch.bfloat16, device),
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_backend("auto", device) == "flash"
        runs = [
            outputs_and_gradients(lambda *x: attention(*x, segments), inputs, torch.bfloat16)
            for _ in range(3)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run))
    assert all(x.isfinite().all() for x in runs[0])


@pytest.mark.gpu(gib=10)
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("rows", [
    [[1000] * 32], [[128] * 256], [[20_000, 13_000]], [[3000] * 11], [[32_768]],
    [[4096]] * 15 + [[4000, 96]],
])  # fmt: skip
@pytest.mark.parametrize("G", [8, 32])
def test_gpu_backward_takes_what_is_declared_at_most(backend, rows, G, device):
    (H, K), (B, T), longest = (
        (32, 128),
        (len(rows), sum(rows[0])),
        max(max(lengths) for lengths in rows),
    )
    q, k, v = (x.detach() for x in make_qkv(B, T, H, G, K, torch.bfloat16, device))
    segments = segments_of(*rows)
    out, lse, lists = torch.ops.fathom.attend(q, k, v, segments, None, FULL.number, backend, False)
    arguments = q, q, k, v, None, [out], [lse], lists, segments, FULL, backend, False
    attend_backward(*arguments)  # makes the library's own workspaces
    gradients, taken = requested_peak(attend_backward, *arguments)
    taken -= sum(x.nbytes for x in gradients)
    declared = backward_workspace(
        backend, B * T, 2 * H * K, 2 * G * K, T, longest, num_key_value_heads=G
    )
    assert taken <= 1.02 * declared + 2**23, (
        f"{taken / 2**20:.0f} MiB, declared are {declared / 2**20:.0f}"
    )
