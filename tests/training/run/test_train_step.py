"""What a step hands to the model."""

from dataclasses import replace

import pytest
import torch

from kernels import head_loss
from kernels.fp8 import FP8
from kernels.head_loss import IGNORE_INDEX
from model import MODEL_SIZES, Transformer
from tests.training.data.test_packing import EOS, make_documents
from training.data.loader import make_batch
from training.data.tokens import TokenStore
from training.memory.placement import set_linear
from training.parallel.world import World
from training.run.stopping import Stopped
from training.run.train_step import run_model, validate


def test_the_chunked_loss_need_not_count_targets_on_the_gpu(monkeypatch):
    """The batch has counted them. A count on the GPU would make the host wait once per
    micro-batch."""
    told, loss = [], head_loss.linear_cross_entropy

    def recording(*args, **kwargs):
        told.append(kwargs["num_valid_tokens"])
        return loss(*args, **kwargs)

    monkeypatch.setattr(head_loss, "linear_cross_entropy", recording)
    model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    model.loss_impl = "chunked"
    store = TokenStore(make_documents([5, 17]), EOS)
    batch = make_batch(store, [[(0, 0, 6), (1, 0, 9)]], 24)
    run_model(model, batch, World(0, 1, torch.device("cpu")), 1.0)
    assert told == [int((batch.targets != IGNORE_INDEX).sum())]


def test_validations_multiply_in_bf16_whatever_steps_do():
    model, world = (
        Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=2)),
        World(0, 1, torch.device("cpu")),
    )
    batches = [make_batch(TokenStore(make_documents([n]), EOS), [[(0, 0, n)]], 24) for n in (17, 5)]
    expected, fp8 = validate(model, batches, world, lambda: False), FP8("torch")
    set_linear(model, fp8)
    assert validate(model, batches, world, lambda: False) == expected
    with pytest.raises(Stopped):
        validate(model, batches, world, lambda: True)
    assert all(block.self_attn.linear == block.mlp.linear == fp8 for block in model.layers)
    with torch.no_grad():
        assert (
            run_model(model, batches[0], world)
            != validate(model, batches[:1], world, lambda: False)[0]
        )
