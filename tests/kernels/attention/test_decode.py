"""One new token on cached keys against the whole sequence."""

import pytest
import torch

from kernels.attention.sparse import decode, selection
from kernels.attention.sparse.decode import choose_for_last_token
from kernels.attention.sparse.sparse_attention import Sparse
from tests.kernels.attention.inputs import attend_sparsely, make_qkv, select_blocks


@pytest.mark.parametrize(("early", "late"), [(selection.EARLY, selection.LATE), (160, 224)])
@pytest.mark.parametrize(
    "kind", [Sparse(2, 32, 64), Sparse(0, 32, 32), Sparse(20, 32, 96), Sparse(1, 64, 64)]
)
def test_every_token_as_in_the_whole_sequence(kind, early, late, monkeypatch):
    """Token by token after a prompt of 70. Blocks are scored two at a time, with each `Look` from
    its position on."""
    monkeypatch.setattr(decode, "BLOCKS_AT_A_TIME", 2)
    monkeypatch.setattr(selection, "EARLY", early)
    monkeypatch.setattr(selection, "LATE", late)
    options = {name: getattr(kind, name) for name in ("selected_blocks", "block_size", "window")}
    q, k, v = make_qkv(2, 333, 6, 2, 32, torch.float32, "cpu")
    out = attend_sparsely(q, k, v, **options)
    lists = select_blocks(q, k, **options)
    torch.testing.assert_close(
        attend_sparsely(q[:, :70], k[:, :70], v[:, :70], **options), out[:, :70]
    )
    for T in (71, 95, 96, 97, 128, 129, 161, 190, 224, 225, 257, 288, 289, 319, 320, 321, 333):
        last = slice(T - 1, T)
        found = kind.decode(q[:, last], k[:, :T], v[:, :T], None)
        torch.testing.assert_close(found, out[:, last], rtol=1e-5, atol=1e-6)
        chosen = choose_for_last_token(q[:, T - 1], k[:, :T], kind)
        count = chosen.shape[-1]
        assert (
            torch.equal(chosen, lists[:, T - 1, :, :count].long())
            and (lists[:, T - 1, :, count:] == 32767).all()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_choose_the_same_blocks(dtype, device):
    q, k, _ = make_qkv(1, 300, 6, 2, 64, dtype, device)
    lists = select_blocks(q, k, selected_blocks=2, block_size=32, window=64, impl="triton")
    for T in range(192, 301, 27):
        chosen = choose_for_last_token(q[:, T - 1], k[:, :T], Sparse(2, 32, 64))
        assert torch.equal(chosen, lists[:, T - 1].long())
