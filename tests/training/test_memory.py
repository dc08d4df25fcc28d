from dataclasses import replace

import pytest
import torch

from model import MODEL_SIZES, Transformer
from training.memory import apply_gradient_checkpointing, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 2**30), ("24 GiB", 24 * 2**30), ("1.5g", 3 * 2**29), ("512MB", 2**29), ("1000", 1000)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "24 gigs", "1e9"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match='looks like "24GB"'):
        parse_bytes(text)


def saved_bytes(model, ids):
    """Bytes of the distinct activations that autograd keeps for backward."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, ids).loss
    loss.backward()
    return sum(kept.values()), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_checkpointing_keeps_block_inputs_only_and_changes_no_gradient():
    ids = torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(0))
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = Transformer(replace(MODEL_SIZES["tiny"], num_hidden_layers=6))
        if checkpointing:
            apply_gradient_checkpointing(model.layers)
        results.append(saved_bytes(model, ids))
    (plain, plain_gradients), (checkpointed, gradients) = results
    assert checkpointed < plain / 4
    assert torch.equal(gradients, plain_gradients)
