import gc
from dataclasses import replace

import pytest
import torch

from model import MODEL_SIZES, Transformer
from training.cost_model import Choices, Step
from training.distributed import World, shard_model
from training.memory import Placement
from training.rates import H200

GIB = 2**30


def step_of(config, context_length, backend="cudnn", loss_impl="auto", **options):
    config = replace(config, attention_backend=backend, loss_impl=loss_impl)
    with torch.device("meta"):
        parameters = list(Transformer(config).to(torch.bfloat16).parameters())
    return Step(config, parameters, context_length, **options)


def test_today_measured():
    """Block checkpointing of the 4B at 131,072 tokens on one H200: 47.2 s, 94.3 GiB (training/optimizer.py's buffers
    for an update, 0.03 GiB, were not there, nor is its first step, whose peak is less)."""
    step = step_of(MODEL_SIZES["4B"], 131_072, packed=False)
    choices = Choices((Placement(),) * 36)
    assert step.peak(choices).bytes / GIB == pytest.approx(94.3, rel=0.02)
    assert step.seconds(choices, H200) == pytest.approx(47.2, rel=0.05)


@pytest.mark.parametrize("micro_batches", [1, 16])
def test_a_step_takes_as_long_as_its_gradients_on_the_link(micro_batches):
    """With state on the host: bf16 gradients once, or float32 sums there and, but for the first time, back."""
    step = step_of(MODEL_SIZES["4B"], 512, gradient_accumulation_steps=micro_batches)
    choices = Choices((Placement(),) * 36, gpu_state_bytes=0)
    elements, update = 4.02e9, step.optimizer(choices).host / H200.link_bytes
    link_bytes = 2 * elements if micro_batches == 1 else 4 * elements * (2 * micro_batches - 1)
    assert step.seconds(choices, H200) - update > 0.99 * link_bytes / H200.link_bytes


def test_a_head_that_is_not_the_embedding_is_gathered_too(tmp_path):
    """Under FSDP2: embedding, head, and the head's gradient, against the embedding alone where they are tied."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        gathered = []
        for tied in (True, False):
            config = replace(MODEL_SIZES["tiny"], tie_word_embeddings=tied, attention_backend="cpu")
            with torch.device("meta"):
                model = Transformer(config)
            shard_model(model, model.layers, World(0, 1, torch.device("cpu")))
            step = Step(config, model.parameters(), 64)
            gathered.append(step.parameter_bytes - 4 * config.num_parameters())
        assert gathered[1] - gathered[0] == 2 * step.head
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()
