"""profile_memory.py: the prediction against a dry run of the real model, order of the hooks, flags, printing."""

import contextlib
import dataclasses
import gc
import inspect
import json
import types
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import profile_memory
from kernels.linear_cross_entropy import linear_cross_entropy
from model import MODEL_SIZES, Transformer
from profile_memory import CATEGORIES, GIB, Run, largest, main, measure, predict
from training.distributed import World
from training.memory import Placement, apply_placement
from training.optimizer import MasterAdamW


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of every tensor that lives, as the GPU's allocator would; fake tensors cost nothing."""

    def __init__(self):
        super().__init__()
        self.allocated = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.allocated += storage.nbytes()
                self.peak = max(self.peak, self.allocated)
                weakref.finalize(storage, self._free, storage.nbytes())
        return output

    def _free(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def read(self) -> tuple[int, int]:
        peak, self.peak = self.peak, self.allocated
        return self.allocated, peak


@pytest.fixture
def dry_run(monkeypatch):
    """`measure` on fake tensors: the real model, its Triton operations, optimizer and hooks, but no data.

    What kernels take inside an operation does not show in it, so the prediction is made without that too.
    """
    monkeypatch.setattr("kernels.common._default", "triton")
    monkeypatch.setattr(MasterAdamW, "clip_grad_norm", lambda self, max_norm: None)  # its result has no value
    monkeypatch.setattr(profile_memory, "LIBRARY_WORKSPACE", 0)
    monkeypatch.setitem(profile_memory.ATTENTION_WORKSPACE, "cudnn", 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # fake tensors lie on the CPU; nothing is launched

    def run_dry(run: Run):
        with FakeTensorMode(), StorageCounter() as counter:
            torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be cast in place
            try:
                model = Transformer(dataclasses.replace(run.model, attention_backend="auto"))
            finally:
                torch.set_default_dtype(torch.float32)
            if run.gradient_checkpointing:
                apply_placement(model.layers, [Placement()] * len(model.layers))
            ids = torch.randint(run.model.vocab_size, (run.batch_size, run.context_length))
            return measure(model, ids, ids.clone(), counter)

    return run_dry


def run_of(size: str, context_length: int, batch_size: int = 1, checkpointing: bool = True, **changes) -> Run:
    config = dataclasses.replace(MODEL_SIZES[size], attention_backend="cudnn", **changes)
    return Run(config, context_length, batch_size, checkpointing)


RUNS = {
    "4B at 131k": run_of("4B", 131_072, num_hidden_layers=4),
    "4B at 2k, kept activations": run_of("4B", 2048, checkpointing=False, num_hidden_layers=4),
    "8B's untied head": run_of("8B", 8192, num_hidden_layers=3),
    "0.6B, standard loss, two sequences": run_of("0.6B", 4096, 2, num_hidden_layers=5, loss_impl="standard"),
    "0.6B, chunked loss": run_of("0.6B", 4096, checkpointing=False, num_hidden_layers=2, loss_impl="chunked"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_prediction_is_what_a_dry_run_allocates(dry_run, run):
    """Stage by stage and category by category, within 1% of the step's peak."""
    measured = dry_run(run)
    predicted = predict(run)
    assert [row.stage for row in measured] == [row.stage for row in predicted]
    tolerance = 0.01 * largest(measured).peak
    for ours, real in zip(predicted, measured):
        assert abs(ours.allocated - real.allocated) < tolerance, ours.stage
        hidden_logits = 0
        if ours.stage == "loss" and run.model.uses_chunked_loss(run.tokens):  # inside one operation
            hidden_logits = 2 * profile_memory.LOSS_CHUNK_TOKENS * run.model.vocab_size
        assert -tolerance < ours.peak - real.peak < tolerance + hidden_logits, ours.stage
        # At the peak a measurement cannot tell the part that runs from the gradients which that has just made.
        for category in () if "peak" in ours.stage else CATEGORIES:
            assert abs(ours.held[category] - real.held[category]) < tolerance, (ours.stage, category)


def test_the_whole_4b_dry_run_has_the_predicted_peak_and_owner(dry_run):
    run = run_of("4B", 131_072)
    measured = dry_run(run)
    top, expected = largest(measured), largest(predict(run))
    assert top.stage == expected.stage == "backward's peak: layer 35 MLP"
    assert abs(expected.peak / top.peak - 1) < 0.002
    for category in CATEGORIES:
        assert abs(expected.held[category] - top.held[category]) < 0.005 * top.peak, category
    stages = [row.stage for row in measured]
    layers = [f"layer {i}" for i in range(36)]
    ends = ["after forward", "loss", top.stage, "after backward", "optimizer"]
    assert stages == ["parameters", "start of the step", "after embedding", *layers, *ends]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_measured_categories_sum_to_what_the_counter_read(dry_run, checkpointing):
    run = run_of("tiny", 256, 2, checkpointing)
    measured = dry_run(run)
    for row in measured:
        assert sum(row.held.values()) == row.allocated <= row.peak
    by_stage = {row.stage: row for row in measured}
    assert by_stage["parameters"].held["parameters"] == 2 * run.model.num_parameters()
    state = by_stage["optimizer"].held
    assert state["gradients"] == state["attention"] == state["MLP"] == state["loss"] == 0
    kept = by_stage["layer 3"].held["attention"] - by_stage["layer 2"].held["attention"]
    assert (kept == 0) == checkpointing


@pytest.mark.parametrize("size", ["tiny", "4B"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_predicted_table(size, checkpointing):
    run = run_of(size, 4096, checkpointing=checkpointing)
    rows = {row.stage.split(":")[0]: row for row in predict(run)}
    parameters, layers = run.model.num_parameters(), run.model.num_hidden_layers
    assert rows["parameters"].allocated == 2 * parameters
    room = 4 * min(2**23, run.model.vocab_size * run.model.hidden_size)
    assert rows["start of the step"].held["optimizer"] == 12 * parameters + room
    assert rows["after backward"].held["gradients"] == 4 * parameters
    assert rows["optimizer"].allocated == rows["start of the step"].allocated
    hidden = 2 * 4096 * run.model.hidden_size
    if checkpointing:
        assert rows[f"layer {layers - 1}"].held["residual stream"] == (layers + 1) * hidden
    for row in rows.values():
        assert row.allocated <= row.peak
        assert set(row.held) == set(CATEGORIES) and min(row.held.values()) >= 0
    for category in ("residual stream", "attention", "MLP", "loss"):
        assert rows["after backward"].held[category] == 0


def test_the_owners_4b_at_131k():
    rows = {row.stage: row for row in predict(run_of("4B", 131_072))}
    gib = {name: (row.allocated - row.held["optimizer"]) / GIB for name, row in rows.items()}
    assert gib["parameters"] == pytest.approx(4_022_468_096 * 2 / GIB)
    assert gib["layer 0"] - gib["after embedding"] == pytest.approx(0.625)
    assert 30 < gib["after forward"] < 32


def test_the_loss_works_in_chunks_of_the_size_assumed():
    chunk_size = inspect.signature(linear_cross_entropy).parameters["chunk_size"].default
    assert chunk_size == profile_memory.LOSS_CHUNK_TOKENS


def test_more_tokens_take_more_memory():
    peaks = [largest(predict(run_of("4B", n))).peak for n in (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)]
    assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks)
    assert largest(predict(run_of("4B", 4096, 2))).peak > largest(predict(run_of("4B", 4096))).peak
    kept = largest(predict(run_of("4B", 65_536, checkpointing=False))).peak
    assert kept > largest(predict(run_of("4B", 65_536))).peak


def test_prediction_is_printed_and_written(tmp_path, capsys):
    path = tmp_path / "memory.json"
    assert main(["--device", "cpu", "--context_length", "131072", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "predicted, not measured" in out and "layer 35 " in out and "backward's peak: layer 35 MLP" in out
    written = json.loads(path.read_text())
    assert written["model_size"] == "4B" and "measured" not in written
    assert sum(written["predicted"][0]["held"].values()) == 2 * 4_022_468_096


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--attention_type", "nsa"], "sparse attention is not in this version"),
        (["--context_length", "0"], "context_length must be at least 2, got 0"),
        (["--context_length", "many"], "invalid int value"),
        (["--batch_size", "0"], "batch_size must be at least 1, got 0"),
        (["--model_size", "5B"], "invalid choice"),
        (["--contextlength", "5"], "unrecognized arguments"),
        (["--attention_backend", "slow"], "invalid choice"),
        (["--json", "nowhere/memory.json"], "no folder nowhere"),
    ],
)
def test_bad_flags_are_one_line(argv, message, capsys):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and message in captured.err


def test_cuda_asked_for_and_absent(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["--device", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("error: --device cuda")


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Everything `profile` asks a GPU for, except the measurement."""
    world = World(0, 1, torch.device("cuda", 0))
    monkeypatch.setattr(profile_memory, "join_world", lambda device: contextlib.nullcontext(world))
    monkeypatch.setattr(profile_memory, "choose_backend", lambda requested, device: "cudnn")
    properties = types.SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 90 * GIB)


def test_measured_is_printed_beside_predicted(pretended_gpu, dry_run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(profile_memory, "measure_on_gpu", lambda run, world: dry_run(run))
    path = tmp_path / "memory.json"
    assert main(["--model_size", "tiny", "--context_length", "512", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "measured on pretended" in out and "| predicted" in out and "%" in out
    assert len(json.loads(path.read_text())["measured"]) == 4 + 8


def test_out_of_memory_prints_the_prediction_and_one_line(pretended_gpu, monkeypatch, capsys):
    def measure_on_gpu(run, world):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profile_memory, "measure_on_gpu", measure_on_gpu)
    assert main([]) == 1
    captured = capsys.readouterr()
    assert "predicted, not measured" in captured.out and "backward's peak: layer 35 MLP" in captured.out
    assert captured.err.count("\n") == 1 and "this GPU has 80.0" in captured.err


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--loss_impl", "chunked"], ["--no-gradient_checkpointing"]])
def test_measured_and_predicted_peaks_agree(tmp_path, flags):
    gc.collect()  # models of earlier tests
    path = tmp_path / "memory.json"
    assert main(["--model_size", "0.6B", "--context_length", "16384", "--json", str(path), *flags]) == 0
    results = json.loads(path.read_text())
    measured, predicted = (max(row["peak"] for row in results[name]) for name in ("measured", "predicted"))
    assert abs(predicted / measured - 1) < 0.1
