import copy
import gc
import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from kernels.attention.full import FULL, attention_flops, together_pairs
from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.gated_delta_net import DeltaNet
from kernels.lora import LORA
from kernels.qkv_attention import AttentionPart
from model import MODEL_SIZES, Transformer
from training.families.lora import Adapters
from training.families.trained import ALL
from training.memory.cost_model import forward_flops, fullest_stage, pinned_bytes, step_seconds
from training.memory.dry_run import results_bytes
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.machine import H200
from training.memory.plan import Plan
from training.memory.planner import _Search, find_max_context
from training.memory.stages import Stages
from training.memory.step import PackedDocuments, Scoring, Step
from training.memory.timeline import UPDATE_BESIDE_FORWARD, attention_seconds, timeline
from training.optim.inventory import NUM_SLOTS
from training.parallel.world import World, make_mesh
from training.run.build import model_on_meta, step_on_meta
from training.run.build import step_of as step_of_run
from training.run.decide import recipe_of
from training.run.settings import TrainConfig

GIB = 2**30


def step_of(
    config, context_length, backend="cudnn", loss_impl="auto", state_format="float32", **options
):
    given = Execution(loss_impl=loss_impl, attention_backend=backend, state_format=state_format)
    with torch.device("meta"):
        model = Transformer(config, options.get("tensor_ranks", 1)).to(torch.bfloat16)
    return Step(model.shard, list(model.named_parameters()), context_length, given=given, **options)


def test_today_measured():
    """Block checkpointing of the 4B at 131,072 tokens on one H200: 47.2 s, 94.3 GiB
    (training/optimizer.py's buffers for an update, 0.03 GiB, were not there, nor is its first step,
    whose peak is less)."""
    step = step_of(MODEL_SIZES["4B"], 131_072, documents=PackedDocuments.one_each(131_072, 1))
    execution = Execution((Placement(),) * 36)
    assert fullest_stage(step, execution).bytes / GIB == pytest.approx(94.3, rel=0.02)
    assert step_seconds(step, execution, H200) == pytest.approx(47.2, rel=0.05)


def test_a_rank_waits_for_the_one_with_most_pairs():
    """Of sequences of 10, 6, 10 and 7 pairs, one rank takes 6 + 10, the other 7 + 10; or 6 and 7,
    then 10 each."""
    lengths, sequences = np.array([4, 2, 2, 4, 1, 3, 4]), np.array([0, 1, 1, 2, 3, 3, 4])
    documents = PackedDocuments.average(lengths, sequences, longest=4, batch_size=2, num_ranks=2)
    assert documents == PackedDocuments(4, ((1, 1), (3, 1), (4, 1))) and documents.count == 3
    documents = PackedDocuments.average(
        lengths, sequences, 4, batch_size=1, num_ranks=2, micro_batches=2
    )
    assert (
        documents == PackedDocuments(4, ((1, 1 / 2), (3, 1 / 2), (4, 1 / 2)))
        and documents.count == 3 / 2
    )
    alone = PackedDocuments.average(lengths, sequences, longest=4, batch_size=1, num_ranks=1)
    assert alone == PackedDocuments(
        4, ((1, 1 / 5), (2, 2 / 5), (3, 1 / 5), (4, pytest.approx(3 / 5)))
    )
    assert alone.count == pytest.approx(7 / 5)
    assert PackedDocuments.one_each(4, 2) == PackedDocuments(4, ((4, 2),))


def test_documents_of_nearly_one_length_are_counted_as_of_one():
    """With as many pairs as theirs. Equal lengths stay what they are: limits of lengths are
    compared with them."""
    lengths, sequences = np.array([310, 320, 315, 1500] * 3), np.arange(12) // 4
    documents = PackedDocuments.average(lengths, sequences, longest=1500, batch_size=1, num_ranks=1)
    [(near, of_near), (far, of_far)] = documents.lengths
    assert 310 < near < 320 and (of_near, far, of_far) == (pytest.approx(3), 1500, pytest.approx(1))
    pairs = sum(n * (n + 1) / 2 for n in (310, 320, 315))
    assert of_near * near * (near + 1) / 2 == pytest.approx(pairs, rel=1e-6)
    for sequences in range(1, 50):
        same = np.full(sequences, 2048), np.arange(sequences)
        documents = PackedDocuments.average(*same, longest=2048, batch_size=1, num_ranks=1)
        assert documents.lengths == ((2048, pytest.approx(1)),)


def test_short_and_long_documents_are_counted():
    """A sequence of documents of 3,000, 2,048 and 952 tokens, of which cuDNN attends to the longest
    alone."""
    lengths = np.array([3000, 2048, 952])
    documents = PackedDocuments.average(
        lengths, np.zeros(3, dtype=int), longest=3000, batch_size=1, num_ranks=1
    )
    assert documents == PackedDocuments(3000, ((952, 1), (2048, 1), (3000, 1)))
    pairs = [n * (n + 1) / 2 for n in lengths.tolist()]
    for backend, alone, tokens in (("auto", 1, 3000), ("flash", 0, 6000)):
        forward, choice, backward = FULL.work(documents.lengths, 4, 2, 32, backend=backend, steps=2)
        flops = attention_flops(4, 32, sum(pairs[:alone]))
        together = attention_flops(4, 32, together_pairs(sum(pairs[alone:]), tokens))
        expected = {"full": flops, "together": pytest.approx(together), "full calls": 2 * alone}
        assert (
            forward == {f"{name} forward": amount for name, amount in expected.items()}
            and choice == {}
        )
        expected = {
            "full": 2.5 * flops,
            "together": pytest.approx(2.5 * together),
            "full calls": 2 * alone,
        }
        assert backward == {f"{name} backward": amount for name, amount in expected.items()}
    whole, _, _ = FULL.work([(1000, 2)], 4, 2, 32, backend="auto", steps=2, is_packed=False)
    flops = attention_flops(4, 32, 1000 * 1001)
    assert whole == {"full forward": flops, "together forward": 0, "full calls forward": 0}


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_seconds_of_documents_that_attend_together(backend):
    """480 documents of lengths exponential about 273, forward and backward: 18 ms on an H200."""
    lengths = np.random.default_rng(0).exponential(273, 480).astype(int).clip(1, 2048)
    documents = PackedDocuments.average(
        lengths, np.zeros(480, dtype=int), 2048, batch_size=1, num_ranks=1
    )
    step = step_of(MODEL_SIZES["4B"], int(lengths.sum()), backend, documents=documents)
    forward, choice, backward = attention_seconds(
        step, step.given, step.parts[0].mixer, documents, H200
    )
    assert 1000 * (forward + backward) == pytest.approx(18, rel=0.15) and choice == 0


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
def test_short_documents_take_less_time_and_room(heads_at_a_time):
    """32 documents of 4,096 tokens have a 32nd of the pairs of one of 131,072; each attends alone
    and costs a call."""
    execution = Execution((Placement("gpu", "gpu"),) * 36, 8192, heads_at_a_time)
    whole, short = (
        step_of(MODEL_SIZES["4B"], 131_072, documents=documents)
        for documents in (
            PackedDocuments.one_each(131_072, 1),
            PackedDocuments(4096, ((4096, 32),)),
        )
    )
    attention = 36 * 4 * 4096 * (131_072 * 131_073 / 2)
    attention *= 1 / H200["full forward"] + 2.5 / H200["full backward"]
    calls = 1 / H200["full calls forward"] + 1 / H200["full calls backward"]
    calls *= 36 * 32 * (8 if heads_at_a_time else 1)
    saved = step_seconds(whole, execution, H200) - step_seconds(short, execution, H200)
    assert saved == pytest.approx(31 / 32 * attention - calls, rel=0.02)
    assert fullest_stage(short, execution).bytes < fullest_stage(whole, execution).bytes


@pytest.mark.parametrize(
    ("size", "heads_at_a_time"), [("4B", None), ("4B", 1), ("qwen3.5-4B", None)]
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_sequence_share_its_work(num_ranks, size, heads_at_a_time):
    """All but the update, which FSDP2 would share. Exchanges go there, back and, in backward, there
    again."""
    sent = {
        "4B": 36 * (2 * 4096 + 2 * 1024),
        "qwen3.5-4B": 24 * (2 * 2048 + 2 * 4096) + 8 * (2 * 4096 + 2 * 1024),
    }
    execution = Execution(
        (Placement("gpu", "gpu"),) * MODEL_SIZES[size].num_hidden_layers, 8192, heads_at_a_time
    )
    alone, shared = (step_of(MODEL_SIZES[size], 131_072, num_ranks=n) for n in (1, num_ranks))
    update = alone.inventory(execution).updated_here / H200["memory"]
    exchange = 2 * sent[size] * 131_072 / num_ranks * (num_ranks - 1) / num_ranks / H200["gpu link"]
    waits = 3 * exchange * (1.01 if heads_at_a_time else 1)  # smaller launches
    expected = (step_seconds(alone, execution, H200) - update) / num_ranks + update + waits
    assert step_seconds(shared, execution, H200) == pytest.approx(expected, rel=1e-6)
    assert num_ranks * shared.input_bytes == alone.input_bytes
    of_all, of_one = (results_bytes(step, step.parts[0])[0] for step in (alone, shared))
    assert num_ranks * of_one == pytest.approx(of_all, rel=0.006)  # a document keeps no last state
    assert shared.at(262_144).tokens == 2 * shared.tokens == 262_144 // num_ranks
    assert find_max_context(shared, 100 * GIB, 0) > find_max_context(alone, 100 * GIB, 0)


def test_what_fsdp_sends_hides_behind_long_sequences():
    """The 4B on eight GPUs over PCIe. Of 512 tokens blocks wait for parameters, twice, and for sums
    of gradients.

    Of 131,072 tokens only the embedding, which is the head, is waited for: its gather before all,
    and its sum after.
    """
    execution, rates = Execution((Placement("gpu", "gpu"),) * 36, 8192), H200 | {"gpu link": 25e9}
    byte, embedding = (
        7 / 8 * 4.0225e9 / 25e9,
        7 / 8 * 151_936 * 2560 / 25e9,
    )  # s, for a byte of each parameter
    for context_length, sent in (
        (512, (2 + 2 + 4) * byte - 2 * embedding),
        (131_072, (2 + 4) * embedding),
    ):
        step = step_on_meta(MODEL_SIZES["4B"], context_length, num_gpus=8)
        alone = step_seconds(step, execution, rates | {"gpu link": math.inf})
        waits = step_seconds(step, execution, rates) - alone
        assert sent - (alone if context_length == 512 else 0) <= waits <= sent * 1.001


def test_fsdp_over_machines_waits_for_the_network():
    """Short steps on two machines of one GPU and of eight. All GPUs of a machine have adapters of
    their own."""
    execution, rates = Execution((Placement("gpu", "gpu"),) * 36, 8192), H200 | {"network": 5e9}
    byte, embedding = (
        4.0225e9 / 5e9,
        151_936 * 2560 / 5e9,
    )  # s, for a byte of each parameter through one adapter
    for num_gpus in (2, 16):
        one, two = (
            step_on_meta(MODEL_SIZES["4B"], 512, num_gpus=num_gpus, num_machines=n) for n in (1, 2)
        )
        assert fullest_stage(one, execution) == fullest_stage(two, execution)
        sent = (
            (2 + 2 + 4) * byte - 2 * embedding
        ) / num_gpus  # gathered twice, the embedding once; summed in float32
        compute = step_seconds(one, execution, rates | {"gpu link": math.inf})
        assert sent - compute <= step_seconds(two, execution, rates) - compute <= sent * 1.001
        assert step_seconds(two, execution, rates) > 2 * step_seconds(one, execution, rates)
        assert step_seconds(two, execution, rates | {"network": math.inf}) == step_seconds(
            one, execution, rates
        )
    assert step_seconds(two, execution, H200) == step_seconds(
        one, execution, H200
    )  # eight adapters of 25 GB/s against NVLink
    row = "over 2 machines, 5.0 GB/s per GPU between them"
    assert f"{row}, measured" in str(Plan(two, execution, rates=rates))
    assert f"{row.replace('5.0', '25.0')}, assumed" in str(Plan(two, execution))
    assert "machines" not in str(Plan(one, execution, rates=rates))


def test_copies_of_the_weights_sum_gradients_between_machines():
    """Short steps on two machines of eight GPUs: only sums of shards go between them, once per
    step.

    In a step of one micro-batch that are as many bytes as FSDP over both machines sends: 8 per
    parameter of a shard.
    """
    execution, rates = Execution((Placement("gpu", "gpu"),) * 36, 8192), H200 | {"network": 5e9}
    options = {"num_gpus": 16, "num_machines": 2}
    one, two = (step_on_meta(MODEL_SIZES["4B"], 512, **options, replicate=n) for n in (1, 2))
    inside = step_on_meta(MODEL_SIZES["4B"], 512, num_gpus=16, replicate=2)
    parameters = MODEL_SIZES["4B"].num_parameters()
    assert two.inventory(execution).gpu_state == pytest.approx(8 * parameters / 8, rel=1e-3)
    assert two.inventory(execution).gpu_state == pytest.approx(
        2 * one.inventory(execution).gpu_state, rel=1e-3
    )
    gathered, summed = (
        7 / 8 * parameters / H200["gpu link"],
        4 * parameters / 8 / 5e9,
    )  # s: of a byte; of all shards
    embedding = 151_936 * 2560 / parameters
    expected = (2 + 2 + 4) * gathered - 2 * embedding * gathered + summed
    compute = step_seconds(two, execution, rates | {"gpu link": math.inf, "network": math.inf})
    assert expected - compute <= step_seconds(two, execution, rates) - compute <= expected * 1.001
    one_of_four, four = (
        step_on_meta(MODEL_SIZES["4B"], 512, 1, 4, **options, replicate=n) for n in (1, 2)
    )
    assert step_seconds(four, execution, rates) < 0.7 * step_seconds(one_of_four, execution, rates)
    assert (
        fullest_stage(four, execution).bytes
        <= fullest_stage(one_of_four, execution).bytes + 8 * parameters / 8
    )
    assert step_seconds(two, execution, rates | {"network": H200["gpu link"]}) == step_seconds(
        inside, execution, rates
    )
    wide = step_on_meta(
        MODEL_SIZES["4B"], 512, num_gpus=32, num_machines=4, replicate=2
    )  # a copy per two machines
    assert step_seconds(wide, execution, rates) > step_seconds(two, execution, rates)
    # The float32 sums over copies stay beside the gradients until backward ends.
    idle = [fullest_stage(step, execution).idle for step in (one, two)]
    assert idle[1] - idle[0] >= 4 * parameters / 8
    row = r"copies of the weights +2, each sharded over 8\n"
    assert re.search(row, str(Plan(two, execution))) and not re.search(
        row, str(Plan(one, execution))
    )


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
@pytest.mark.parametrize("tensor_ranks", [2, 4])
def test_ranks_that_share_matrices_share_products_and_attention(tensor_ranks, heads_at_a_time):
    """Sums over ranks take their time: in a placed block two forward, two backward and attention's
    again."""
    execution = Execution((Placement("gpu", "gpu"),) * 36, 8192, heads_at_a_time)
    config, rates = MODEL_SIZES["4B"], H200 | {"memory": math.inf}
    alone = step_of(config, 131_072)
    shared = step_of(config, 131_072, tensor_ranks=tensor_ranks)
    sums = 36 * 5 * 2 * alone.input_bytes * (1 - 1 / tensor_ranks) / rates["gpu link"]
    expected = step_seconds(alone, execution, rates) / tensor_ranks + sums
    assert step_seconds(shared, execution, rates) == pytest.approx(expected, rel=1e-6)
    assert shared.input_bytes == alone.input_bytes
    assert (
        tensor_ranks * results_bytes(shared, shared.parts[0])[0]
        == results_bytes(alone, alone.parts[0])[0]
    )
    assert find_max_context(shared, 100 * GIB, 0) > find_max_context(alone, 100 * GIB, 0)


def test_fsdp_gathers_what_a_rank_has_of_shared_matrices():
    """Of 4 ranks that all shard parameters, and of 2 x 2 of which 2 share matrices: norms are split
    among 2 alone."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        config, steps = MODEL_SIZES["tiny"], []
        for size in (1, 2):
            world = World(0, 4, torch.device("cpu"), make_mesh("cpu", 4, 1, size))
            model = model_on_meta(config, world)
            settings = TrainConfig(tensor_parallel_size=size, optimizer_state="float32")
            steps.append(step_of_run(recipe_of(settings, config, world), model, world, None))
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()
    matrices = 4 * config.layer_matrix_parameters() + config.vocab_size * config.hidden_size
    norms = config.num_parameters() - matrices
    own = [(matrices + norms) / 4, matrices / 4 + norms / 2]
    assert [step.inventory(step.given).gpu_state for step in steps] == [
        8 * elements for elements in own
    ]
    gathered = [step.parameter_bytes - 4 * elements for step, elements in zip(steps, own)]
    assert gathered[0] == 2 * gathered[1] > 0
    plan = str(Plan(steps[1], replace(steps[1].given, placements=(Placement(),) * 4)))
    assert "GPUs, data x context x tensor  2 x 1 x 2; below, of each" in plan


@pytest.mark.parametrize("micro_batches", [1, 16])
def test_a_step_takes_as_long_as_its_gradients_on_the_link(micro_batches):
    """With state on the host: bf16 gradients once, or float32 sums there and, but for the first
    time, back."""
    step = step_of(MODEL_SIZES["4B"], 512, micro_batches=micro_batches)
    execution = Execution((Placement(),) * 36, gpu_state_bytes=0)
    elements, update = 4.02e9, step.inventory(execution).host / H200["link"]
    link_bytes = 2 * elements if micro_batches == 1 else 4 * elements * (2 * micro_batches - 1)
    assert step_seconds(step, execution, H200) - update > 0.99 * link_bytes / H200["link"]


VISITS, PAIR = (
    Placement("host", "host", weights="host"),
    Placement("recompute", "host", weights="host"),
)
BLOCK = 2 * (MODEL_SIZES["4B"].layer_matrix_parameters() + 2 * 2560 + 2 * 128)  # bytes


def parameter_bytes_by_stage(placements, size="4B", **options):
    step = step_of(MODEL_SIZES[size], 8192, state_format="compact")
    execution = Execution(
        tuple(placements), 8192, 1, gpu_state_bytes=0, state_format="compact", **options
    )
    return {stage.name: stage.categories["parameters"] for stage in Stages(step, execution)}


def test_weights_of_two_blocks_visit_at_once():
    """The embedding and the last norm stay. The block that runs has its weights, and the next one's
    arrive."""
    stay = 2 * (151_936 * 2560 + 2560)
    none, alone = {"embedding", "loss", "backward of embedding", "update"}, {"forward of layer 35"}
    alone |= {f"backward of layer 0, {part}" for part in ("MLP", "attention")}
    for placements in ((VISITS,) * 36, (VISITS, PAIR) * 18):
        for name, size in parameter_bytes_by_stage(placements).items():
            visiting = 0 if name in none else 1 if name in alone else 2
            assert size == stay + visiting * BLOCK, name


@pytest.mark.parametrize("size", ["4B", "8B"])
def test_embedding_and_head_visit_before_and_after_the_blocks(size):
    """Only the last norm stays. Beside the loss the last block's weights come back, or block 34's
    for its input."""
    config = MODEL_SIZES[size]
    end, block = (
        2 * 151_936 * config.hidden_size,
        2 * sum(p.numel for p in config.layer_parameters(0).values()),
    )
    for placements in ((VISITS,) * 36, (VISITS, PAIR) * 18):
        sizes = parameter_bytes_by_stage(placements, size, loss_impl="chunked", ends="host")
        visiting = {
            "embedding": end + block,
            "forward of layer 35": block + end,
            "loss": end + block,
        }
        visiting |= {"forward of layer 0": 2 * block, "backward of layer 35, MLP": 2 * block}
        visiting |= {
            "backward of layer 0, attention": block,
            "backward of embedding": 0,
            "update": 0,
        }
        assert {name: sizes[name] - 2 * config.hidden_size for name in visiting} == visiting


def test_the_first_blocks_visit_while_they_run():
    sizes = parameter_bytes_by_stage((VISITS,) * 2 + (Placement(),) * 34)
    stay = 2 * 4_022_468_096 - 2 * BLOCK
    forward = {
        "embedding": 0,
        "forward of layer 0": 2,
        "forward of layer 1": 1,
        "forward of layer 2": 0,
        "loss": 0,
    }
    backward = {
        f"backward of layer {layer}, MLP": n for layer, n in {3: 0, 2: 1, 1: 2, 0: 1}.items()
    }
    assert {name: (sizes[name] - stay) / BLOCK for name in forward | backward} == forward | backward
    # The input of block 2 is recomputed from block 1, after it comes block 0: never three at once.
    chain = (VISITS, VISITS, replace(PAIR, input="recompute"), VISITS) * 9
    assert parameter_bytes_by_stage(chain)["backward of layer 2, MLP"] == 2 * (
        151_936 * 2560 + 2560 + BLOCK
    )


@pytest.mark.parametrize("state_format", ["float32", "compact"])
@pytest.mark.parametrize(("size", "micro_batches"), [("4B", 1), ("8B", 1), ("0.6B", 2)])
def test_weights_that_visit_free_the_gpu_and_take_the_host(size, micro_batches, state_format):
    """The more blocks visit, the less of the GPU a step takes in all stages, and 2 bytes per
    parameter of the host."""
    config = MODEL_SIZES[size]
    step = step_of(config, 4096, micro_batches=micro_batches, state_format=state_format)
    place, L, stages, host = Placement("host", "host"), config.num_hidden_layers, [], []
    for count in range(0, L + 1, 4):
        placements = (replace(place, weights="host"),) * count + (place,) * (L - count)
        execution = Execution(placements, 8192, 1, gpu_state_bytes=0, state_format=state_format)
        stages.append([stage.bytes for stage in Stages(step, execution)])
        host.append(pinned_bytes(step, execution))
    slots = (
        NUM_SLOTS * 2 * (2**23 + 3 * config.hidden_size)
    )  # room for pieces of weights, of each format
    for fewer, more in pairwise(stages):
        assert all(after <= before + slots for before, after in zip(fewer, more))
    block = 2 * sum(p.numel for p in config.layer_parameters(0).values())
    assert max(stages[-1]) < max(stages[0]) - (L - 2) * block + slots + 2**28
    for count, size in zip(range(0, L + 1, 4), host):
        assert 0 <= size - host[0] - count * block < 512 * 11 * L


def test_gradients_that_stay_are_the_embeddings_and_the_heads():
    """The 8B, all blocks of which visit: the head's gradient is there in all of backward, the
    embedding's after it."""
    step = step_of(MODEL_SIZES["8B"], 8192, state_format="compact")
    execution = Execution((VISITS,) * 36, 8192, 1, state_format="compact")
    gradients = {stage.name: stage.categories["gradients"] for stage in Stages(step, execution)}
    assert gradients["loss"] == 0  # the loss has it
    for layer in (30, 0):
        assert gradients[f"backward of layer {layer}, MLP"] == pytest.approx(
            step.head + 2**28, rel=1e-3
        )
    assert gradients["update"] == pytest.approx(2 * step.head, rel=1e-4)
    assert step.inventory(execution).gpu_state == pytest.approx(4.125 * step.head, rel=1e-3)


# Backward of blocks 3, 2, 1 and 0 fetches 0, 1, 2, 3; 0, 1, 2; 0, 1; and nothing.
CHAIN = (VISITS, PAIR, PAIR, PAIR) * 9


@pytest.mark.parametrize("ends", ["gpu", "host"])
@pytest.mark.parametrize(
    ("placements", "runs"), [((VISITS,) * 36, 36), ((VISITS, PAIR) * 18, 36), (CHAIN, 81)]
)
def test_a_slow_link_makes_blocks_wait_for_their_weights(placements, runs, ends):
    """Once in forward, and in backward for each run of a block whose weights are not there.

    Embedding and head, which are one, come in forward alone, and beside the loss comes the first
    block of backward. Of 512 tokens, whose activations are nothing beside weights. All gradients
    leave meanwhile, which takes longer than one fetch of each block. The update fetches 8.125 bytes
    of each parameter.
    """
    step, rates = step_of(MODEL_SIZES["4B"], 512, state_format="compact"), H200 | {"link": 1e9}
    execution = Execution(
        placements,
        8192,
        1,
        gpu_state_bytes=0,
        state_format="compact",
        loss_impl="chunked",
        ends=ends,
    )
    visits, head = ends == "host", 151_936 * 2560
    forward = (36 * BLOCK + visits * (2 * 2 * head + BLOCK)) / 1e9
    backward = max((runs - visits) * BLOCK, 2 * 4_022_468_096) / 1e9
    update = (8.125 * 18 * BLOCK + (6.125 + visits * 2) * head) / 1e9
    more = 1 / UPDATE_BESIDE_FORWARD - 1
    update += more * 8.125 * (18 * BLOCK + head) / 1e9
    assert step_seconds(step, execution, rates) == pytest.approx(
        forward + backward + update, rel=0.02
    )
    twice = step_of(MODEL_SIZES["4B"], 512, micro_batches=2, state_format="compact")
    # Float32 sums of gradients leave, and come and leave again in the second backward: longer than
    # weights take.
    sums = 4 * 4_022_468_096 / 1e9
    expected = 2 * forward + sums + 2 * sums + update + (1 + more) * sums / 2
    assert step_seconds(twice, execution, rates) == pytest.approx(expected, rel=0.02)


def test_weights_come_while_long_sequences_are_computed():
    """Of 131,072 tokens only the first block of forward and of backward takes longer, and 1% of
    copies.

    So does the update of the embedding and of the first block, which nothing hides, in proportion
    to all bytes.
    """
    step = step_of(MODEL_SIZES["4B"], 131_072, state_format="compact")
    there, away = (
        Execution(
            (replace(VISITS, weights=place),) * 36,
            8192,
            1,
            gpu_state_bytes=0,
            state_format="compact",
        )
        for place in ("gpu", "host")
    )
    waits = step_seconds(step, away, H200) - step_seconds(step, there, H200)
    first = (step.head + BLOCK) / (2 * 4_022_468_096)
    assert waits == pytest.approx(
        (0.01 * 36 + 2 + first * 36 / UPDATE_BESIDE_FORWARD) * BLOCK / H200["link"], rel=1e-2
    )


def test_a_long_kernel_holds_the_update_up():
    """Qwen3-30B-A3B at 65,536 tokens: 16.5 s on one H200 with all heads at once (9844dff), whose
    kernel takes 64 ms.

    Copies of state fill the ring's slots in 14 ms of them. A head at a time holds less of them up.
    """
    step = step_of(MODEL_SIZES["qwen3-30B-A3B"], 65_536, state_format="compact")
    places = [
        Placement(
            "host" if i < 5 else "gpu",
            "recompute" if i < 13 else "gpu",
            weights="host" if i < 8 else "gpu",
        )
        for i in range(48)
    ]
    at_once, by_head = (
        Execution(tuple(places), 32_768, heads, gpu_state_bytes=49.07 * GIB, state_format="compact")
        for heads in (None, 1)
    )
    assert step_seconds(step, at_once, H200) == pytest.approx(16.5, rel=0.02)
    assert step_seconds(step, by_head, H200) < 15


def test_a_head_that_is_not_the_embedding_is_gathered_too():
    """Under FSDP2: embedding, head, and the head's gradient, against the embedding alone where they
    are tied."""
    gathered = []
    for tied in (True, False):
        config = replace(MODEL_SIZES["tiny"], tie_word_embeddings=tied)
        step = step_on_meta(config, 64, num_gpus=2)
        gathered.append(
            step.parameter_bytes - 4 * sum(shard.numel() for _, shard in step.named_parameters)
        )
        check_that_the_reduction_keeps_its_memory(step, step_of(config, 64))
    assert gathered[1] - gathered[0] == 2 * step.head


def check_that_the_reduction_keeps_its_memory(step, unsharded):
    """In each stage all gradients, alive or idle, and what the embedding's reduction took more than
    a block's.

    Without it the allocator gave back and took again 8 GiB in each step of the 4B on two GPUs: 0.6
    s of 4.1.
    """
    execution = Execution((Placement(),) * step.layers)
    stages = list(Stages(step, execution))
    made = 4 * sum(shard.numel() for _, shard in step.named_parameters)
    assert stages[0].categories["gradients"] == 0 and stages[0].idle >= made
    assert stages[-1].categories["gradients"] == made and stages[-1].idle == stages[0].idle - made
    fullest = max(stage.bytes for stage in stages)
    assert _Search(step, fullest + stages[0].idle, 0).fits(execution)
    assert not _Search(step, fullest, 0).fits(execution)
    assert all(stage.idle == 0 for stage in Stages(unsharded, execution))


@pytest.mark.parametrize("placement", [Placement("gpu", "gpu"), WHOLE], ids=["placed", "whole"])
@pytest.mark.parametrize("size", ["4B", "8B"])
def test_adapters_spare_the_products_of_weights_gradients(size, placement):
    """And the update, but for the adapters'. What adapters read and write is counted beside it."""
    adapters, given = Adapters(16, 32.0), Execution(loss_impl="chunked")
    full = step_on_meta(MODEL_SIZES[size], 32_768, given=given)
    lora = step_on_meta(
        MODEL_SIZES[size], 32_768, given=replace(given, linear=LORA), trained=adapters
    )
    placed = [
        replace(step.given, placements=(placement,) * 36, mlp_tile_size=8192)
        for step in (full, lora)
    ]
    share = full.shard
    matrices = 36 * share.layer_matrix_parameters() + share.vocab_size * share.hidden_size
    updates = [
        step.inventory(e).updated_here / H200["memory"] for step, e in zip((full, lora), placed)
    ]
    forward, backward = (2 * 32_768 * sizes["adapters"] for sizes in adapters.traffic(share, 0))
    again = 0 if placement.is_whole else forward
    expected = 2 * 32_768 * matrices / H200["products"] + updates[0] - updates[1]
    expected -= 36 * (forward + backward + again) / H200["adapters"]
    saved = step_seconds(full, placed[0], H200) - step_seconds(lora, placed[1], H200)
    assert saved == pytest.approx(expected, rel=1e-6)
    assert lora.trained_elements == sum(
        p.numel() for _, p in lora.named_parameters if p.requires_grad
    )
    assert updates[1] < 0.01 * updates[0] and 0 < forward < backward


@pytest.mark.parametrize("loss_impl", ["chunked", "standard"])
def test_objectives_run_a_chunked_head_twice_and_the_base_beside_adapters(loss_impl):
    """Over four micro-batches. The standard loss keeps its logits."""
    base, adapters, T = MODEL_SIZES["4B"], Adapters(16, 32.0), 8192
    given = Execution(loss_impl=loss_impl, linear=LORA)
    without = step_on_meta(base, T, micro_batches=4, given=given, trained=adapters)
    execution = replace(given, placements=(WHOLE,) * 36)
    phases = {phase.name: phase for phase in timeline(without, execution, H200)}
    forward = sum(
        seconds for rate, seconds in phases["forward"].compute.items() if rate != "adapters"
    )
    head = 2 * T * base.hidden_size * base.vocab_size / H200["products"]
    for passes in (0, 1):
        step = copy.copy(without)
        step.scoring = Scoring(1, passes, 45)
        more = step_seconds(step, execution, H200) - step_seconds(without, execution, H200)
        assert more == pytest.approx(
            4 * ((loss_impl == "chunked") * head + passes * (forward + head)), rel=1e-6
        )
        assert (
            fullest_stage(step, execution).bytes - fullest_stage(without, execution).bytes == 45 * T
        )


def test_a_recipe_tells_its_plan_what_its_objective_takes():
    def found(trained=ALL, **flags):
        settings, world = (
            TrainConfig(optimizer_state="float32", **flags),
            World(0, 1, torch.device("cpu")),
        )
        recipe = replace(recipe_of(settings, MODEL_SIZES["tiny"], world), trained=trained)
        scoring = step_of_run(recipe, model_on_meta(recipe.model, world), world, None).scoring
        return scoring.head_passes, scoring.forward_passes

    assert found() == (0, 0) and found(objective="orpo") == (1, 0)
    assert found(objective="dpo") == (1, 0) and found(Adapters(2, 4.0), objective="dpo") == (1, 1)
    assert found(objective="kto") == (1, 1) and found(Adapters(2, 4.0), objective="kto") == (1, 3)
    assert found(Adapters(2, 4.0), objective="grpo") == (1, 0)
    assert found(Adapters(2, 4.0), objective="grpo", beta=0.1) == (1, 1)


def test_layers_without_adapters_have_no_traffic_of_them():
    """Three of four layers of Qwen3.5 have no q_proj."""
    config = replace(MODEL_SIZES["qwen3.5-4B"], num_hidden_layers=4)
    step = step_on_meta(
        config, 4096, given=Execution(linear=LORA), trained=Adapters(4, 8.0, ("q_proj",))
    )
    forward = timeline(step, step.unplanned(Placement()), H200)[0]
    assert forward.compute["adapters"] == pytest.approx(
        2 * 4096 * (2560 + 2 * 16 * 256) / H200["adapters"]
    )


def test_answers_count_what_they_see_of_their_prompts():
    """An answer and its prompt have the pairs of one document. Windows and nsa copy prompts as far
    as they reach, but not for the first answer. Full and sparse attention see a prompt, or its
    whole blocks, in place."""
    config, heads, (P, R) = MODEL_SIZES["4B"], (32, 8, 128), (6410, 640)
    once, whole = forward_flops(config, [P, R], prompts=[(P, 1, R)]), forward_flops(config, [P + R])
    assert once == pytest.approx(whole, rel=1e-9)
    delta, lengths, prompts = DeltaNet().kind, [P, *8 * [R]], [(P, 8, 8 * R)]
    assert delta.forward_flops(lengths, *heads, prompts) == delta.forward_flops(lengths, *heads)
    for kind, copied in (
        (Window(1000), 999),
        (Sparse(32), P),
        (Sparse(32, dense_below=0), 10),
        (NSA(), P),
        (FULL, 0),
    ):
        expected = kind.forward_flops([P + R, *7 * [copied + R]], *heads)
        if kind == FULL or copied == 10:
            expected = 8 * kind.forward_flops([P + R], *heads) - 7 * kind.forward_flops(
                [P - copied], *heads
            )
        assert kind.copied(P) == copied
        assert kind.forward_flops(lengths, *heads, prompts) == pytest.approx(expected, rel=1e-9)
        options = {"backend": "cudnn", "steps": 1, "is_packed": False}  # all documents alone
        work = kind.work([(P, 2), (R, 16)], *heads, **options, prompts=[(P, 8, 8 * R, 2)])
        assert sum(work.forward.values()) == pytest.approx(2 * expected, rel=1e-9)
        of_numpy = [(np.float64(P), 2), (np.float64(R), 16)]
        assert (
            kind.work(of_numpy, *heads, **options, prompts=[(P, 8, np.float64(8 * R), 2)]) == work
        )


def test_documents_of_a_prompt_and_its_answers():
    """Of 1,000 tokens, of which 800 are the prompt: in full attention as much as the pairs that are
    left."""
    documents = PackedDocuments(1000, ((1000.0, 3.0),))
    assert documents.with_prompts(0.0, 0.0) == documents
    shared = documents.with_prompts(0.8, 2.0)
    assert shared.prompts == ((800, 2, pytest.approx(200), 3),) and shared.count == 9
    assert shared.lengths == ((800, 3), (pytest.approx(100), 6))
    work = FULL.work(
        shared.lengths, 4, 2, 32, backend="cudnn", steps=1, is_packed=False, prompts=shared.prompts
    )
    pairs = 3 * (2 * 900 * 901 / 2 - 800 * 801 / 2)
    assert work.forward["full forward"] == pytest.approx(attention_flops(4, 32, pairs))


def test_copies_of_prompts_take_bytes():
    """Counts q, k, v and the output with 7 copies of what a kind reaches of a prompt; in backward
    also gradients."""
    documents = PackedDocuments(32_768, ((16_384, 1), (2048, 8)), ((16_384, 8, 16_384, 1),))
    for kind, tokens in (
        (FULL, 0),
        (Window(4096), 32_768 + 7 * 4095),
        (Sparse(32), 32_768),
        (NSA(), 32_768 + 7 * 16_384),
    ):
        inside, plain = (
            AttentionPart(32, 8, 128, kind).inside_bytes(
                32_768, 2, backend="cudnn", context_length=32_768, longest=32_768, prompts=prompts
            )
            for prompts in (documents.prompts, ())
        )
        more = {name: inside[name] - plain[name] for name in plain}
        q, kv, result = 2 * 32 * 128, 4 * 8 * 128, 2 * 32 * 128 + 4 * 32
        assert more["fathom::attend"] >= tokens * (q + kv + result)
        assert more["fathom::attend_backward"] >= tokens * (2 * (q + kv) + q + result)
        assert more["fathom::attend"] <= 2.2 * tokens * (q + kv + result)


def test_forward_flops_count_attention_causally():
    config = MODEL_SIZES["4B"]
    dense = 2 * (config.num_parameters() - 36 * (2 * 2560 + 256) - 2560) * 131_072
    pairs = 131_072 * 131_073 // 2
    assert forward_flops(config, [131_072]) == dense + 36 * 4 * 32 * 128 * pairs
    assert forward_flops(config, [65_536, 65_536]) < forward_flops(config, [131_072])
    head = 2 * config.vocab_size * config.hidden_size
    assert (
        forward_flops(config, [131_072]) - forward_flops(config, [131_072], num_targets=72)
        == 131_000 * head
    )


def test_frozen_matrices_have_two_products_of_three():
    share = MODEL_SIZES["4B"]
    full, frozen = (
        forward_flops(share, [4096, 100], trains_matrices=trains) for trains in (True, False)
    )
    attention = sum(kind.forward_flops([4096, 100], *share.attention.heads) for kind in share.kinds)
    assert 3 * (frozen - attention) == pytest.approx(2 * (full - attention))
