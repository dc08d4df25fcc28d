"""What opening a model counts, refuses and chooses; what reading with it allocates."""

import gc
import json
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparsity
from kernels.common import set_default_implementation
from model import MODEL_SIZES, KeyValueCache, Transformer
from tests.checkpoints import save_checkpoint
from tests.storage_counter import StorageCounter
from training.families import to_config_json
from training.host.errors import UserError
from training.host.files import write_file
from training.host.memory import GIB
from training.inference import Reading, load, memory_budget, open_folder, plan_reading, token_losses, write
from training.memory import cost_model
from training.memory.execution import Execution
from training.memory.planner import MLP_TILE_SIZE
from training.memory.profiler import CudaCounter
from training.parallel.fsdp import copy_weights, initial_weights
from training.parallel.world import World

CPU, OPS = torch.device("cpu"), torch.ops.fathom
WORLD = World(0, 1, CPU)
TINY = replace(MODEL_SIZES["tiny"], num_hidden_layers=2)
SHAPE = replace(MODEL_SIZES["4B"], num_hidden_layers=3)
AS_TRAINED = Namespace(attention_type=None, selected_blocks=None, dense_below=None, tokenizer=None)


def reading_of(shape, tokens, cached=0, heads=None, sparsity=(), element_size=2):
    execution = Execution(mlp_tile_size=MLP_TILE_SIZE, heads_at_a_time=heads, sparsity=sparsity)
    return Reading(shape, tokens, cached, element_size, execution)


def check(reading, model, counter, least):
    """The counted working memory against the counter's, of which it is to be the share `least` or more."""
    for block in model.layers:
        block.self_attn.heads_at_a_time = reading.execution.heads_at_a_time
        block.self_attn.sparsity = reading.execution.sparsity[0] if reading.execution.sparsity else None
        block.mlp.tile_size = MLP_TILE_SIZE
    ids = torch.zeros(1, reading.tokens, dtype=torch.long, device=model.embed_tokens.weight.device)
    gc.collect()
    before = counter.read().allocated  # the weights, and on a GPU what other tests have left
    with torch.no_grad():
        if reading.cached:
            caches = [KeyValueCache(reading.cached) for _ in model.layers]
            model(ids, caches=caches)
        else:
            hidden = model(ids, return_hidden_states=True).hidden_states
            token_losses(model, hidden, ids)
    working = counter.read().peak - before - reading.cache_bytes
    assert least * reading.forward_bytes < working < 1.01 * reading.forward_bytes


@pytest.mark.parametrize(
    ("cached", "heads", "sparsity"),
    [
        (0, None, None), (0, 1, None), (20_000, None, None), (20_000, 2, None), (20_000, 1, Sparsity()),
        (0, None, Sparsity()), (20_000, 1, NSA()),
    ],
)  # fmt: skip
def test_the_count_is_what_is_allocated(cached, heads, sparsity, monkeypatch):
    monkeypatch.setattr(cost_model, "LIBRARY_BYTES", 0)
    monkeypatch.setattr("training.inference.LIBRARY_BYTES", 0)
    shape = replace(SHAPE, attention_type="nsa") if isinstance(sparsity, NSA) else SHAPE
    reading = reading_of(shape, 16_384, cached, heads, (sparsity,) * 3 if sparsity else ())
    set_default_implementation("triton")
    H, G, K, T = 32, 8, 128, 16_384
    n = heads or G
    workspace = sparsity.footprint(T, H // G * n, n, K).forward_workspace_bytes if sparsity else 0
    heads_bytes = {None: 3 * H + 4 * G, NSA: 4 * H + 2 * G, Sparsity: 2 * H + 2 * G}[sparsity and type(sparsity)]
    own = {OPS.qkv_attention.default: 2 * T * heads_bytes * K * n // G + workspace}
    own |= {op.default: workspace for op in (OPS.select_blocks, OPS.sparse_attention_forward)}
    tile = OPS.tiled_gated_mlp.default
    own[tile] = 2 * 2 * shape.intermediate_size * MLP_TILE_SIZE
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be cast in place
    try:
        with FakeTensorMode(), StorageCounter(own) as counter:
            model = Transformer(shape)
            assert counter.read().allocated == pytest.approx(reading.weight_bytes, rel=1e-3)
            # Sparse attention by groups of heads is counted up to 10% too high.
            check(reading, model, counter, least=0.88 if sparsity else 0.98)
    finally:
        torch.set_default_dtype(torch.float32)
        set_default_implementation("auto")


@pytest.mark.gpu
@pytest.mark.parametrize(("cached", "heads"), [(0, None), (0, 1), (20_000, None), (20_000, 1)])
def test_the_count_is_what_a_gpu_allocates(cached, heads):
    device = torch.device("cuda", 0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Transformer(SHAPE)
    finally:
        torch.set_default_dtype(torch.float32)
    check(reading_of(SHAPE, 16_384, cached, heads), model, CudaCounter(device), least=0.8)  # LIBRARY_BYTES are a bound


def test_fewer_heads_at_a_time_where_memory_is_short_and_a_refusal_with_the_longest_text():
    reading = reading_of(SHAPE, 131_072, 131_072)
    assert plan_reading(reading, 2 * reading.bytes).execution.heads_at_a_time is None
    least = reading_of(SHAPE, 131_072, 131_072, heads=1)
    assert least.bytes < reading.bytes
    short = plan_reading(reading, least.bytes * 1.02)
    assert short.execution.heads_at_a_time in (1, 2) and short.bytes < reading.bytes
    with pytest.raises(UserError, match=r"131,072 tokens take .* at most ([\d,]+) tokens would fit") as refused:
        plan_reading(reading, 0.7 * least.bytes)
    longest = int(str(refused.value).split("at most ")[1].split()[0].replace(",", ""))
    assert plan_reading(reading_of(SHAPE, longest, longest), 0.7 * least.bytes)
    with pytest.raises(UserError, match=r"9 tokens and 900,000 new ones take .* one token would fit besides"):
        plan_reading(reading_of(SHAPE, 9, 900_009), least.bytes)  # 10 GiB of keys and values
    with pytest.raises(UserError, match="not even one token would fit"):
        plan_reading(reading, 1000)
    assert reading_of(MODEL_SIZES["4B"], 1, 131_072).cache_bytes == 18 * GIB
    with pytest.raises(UserError, match="memory_budget 900000GB"):
        memory_budget("900000GB", CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = Transformer(TINY)
    copy_weights(model, initial_weights(model, seed=0))
    state = {"settings": {"attention_type": "sparse", "selected_blocks": "2", "dense_below": 40}}
    return save_checkpoint(
        tmp_path_factory.mktemp("run"), 1, weights=model.state_dict(), model_config=to_config_json(TINY),
        optimizer_state=None, trainer_state=state,
    )  # fmt: skip


def test_attention_is_as_trained_unless_flags_say_otherwise(folder, tmp_path):
    opened = open_folder(folder, AS_TRAINED, WORLD)
    assert opened.sparsity == (Sparsity(2, dense_below=40),) * 2 and opened.stop_ids == {0}
    flags = Namespace(**{**vars(AS_TRAINED), "attention_type": "full"})
    assert open_folder(folder, flags, WORLD).sparsity == ()
    flags = Namespace(**{**vars(AS_TRAINED), "attention_type": "sparse", "selected_blocks": "3,1", "dense_below": 7})
    assert [one.selected_blocks for one in open_folder(folder, flags, WORLD).sparsity] == [3, 1]
    for changed, message in (
        ({"attention_type": "nsa"}, "it has no gates of nsa"),
        ({"attention_type": "full", "selected_blocks": "3"}, "selected_blocks has no effect with attention_type full"),
        ({"dense_below": 0}, "dense_below must be at least 1"),
        ({"selected_blocks": "1,2,3"}, "names 3 layers, the model has 2"),
    ):
        with pytest.raises(UserError, match=message):
            open_folder(folder, Namespace(**{**vars(AS_TRAINED), **changed}), WORLD)
    with pytest.raises(UserError, match=f"is the output_dir of a run; give a checkpoint in it, as {folder}"):
        open_folder(folder.parent, AS_TRAINED, WORLD)
    content = json.loads((folder / "config.json").read_text())
    for name, value in (("hidden_size", "many"), ("model_type", "gpt2")):
        (tmp_path / "config.json").write_text(json.dumps({**content, name: value}))
        with pytest.raises(UserError, match="cannot take"):
            open_folder(tmp_path, AS_TRAINED, WORLD)


def test_a_loaded_model_writes_the_same_by_groups_of_heads(folder):
    opened = open_folder(folder, AS_TRAINED, WORLD)
    model, ids = load(opened, 100, 120, WORLD, None), [int(i) for i in torch.arange(100) * 7 % 256]
    assert model.layers[0].self_attn.sparsity == opened.sparsity[0] and not model.norm.weight.requires_grad
    written = [*write(model, ids, 20)]
    for block in model.layers:
        block.self_attn.heads_at_a_time = 1
    assert [*write(model, ids, 20)] == written == model.generate(torch.tensor([ids]), 20)[0, 100:].tolist()
    stop = written[7]
    assert [*write(model, ids, 20, frozenset([stop]))] == written[: written.index(stop)]


def test_what_ends_an_answer_is_also_in_the_folders_configs(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    write_file(tmp_path / "config.json", json.dumps({**config, "eos_token_id": 3}).encode())
    for content, more in ((b'{"eos_token_id": [7, 9]}', {7, 9}), (b'{"eos_token_id": 5}', {5}), (b"{}", set())):
        write_file(tmp_path / "generation_config.json", content)
        assert open_folder(tmp_path, AS_TRAINED, WORLD).stop_ids == {0, 3, *more}
