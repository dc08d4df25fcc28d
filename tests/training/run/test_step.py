"""What a step hands to the model."""

from dataclasses import replace

import torch

import model as model_file
from model import IGNORE_INDEX, MODEL_SIZES, Transformer
from tests.training.data.test_packing import EOS, make_documents
from training.data.loader import make_batch
from training.data.tokens import TokenStore
from training.parallel.world import World
from training.run.step import run_model


def test_the_chunked_loss_need_not_count_targets_on_the_gpu(monkeypatch):
    """The batch has counted them. A count on the GPU would make the host wait once per micro-batch."""
    told, loss = [], model_file.linear_cross_entropy

    def recording(*args, **kwargs):
        told.append(kwargs["num_valid_tokens"])
        return loss(*args, **kwargs)

    monkeypatch.setattr(model_file, "linear_cross_entropy", recording)
    model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=1))
    model.loss_impl = "chunked"
    store = TokenStore(make_documents([5, 17]), EOS)
    batch = make_batch(store, [[(0, 0, 6), (1, 0, 9)]], 24)
    run_model(model, batch, World(0, 1, torch.device("cpu")), 1.0)
    assert told == [int((batch.targets != IGNORE_INDEX).sum())]
