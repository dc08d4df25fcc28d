import pytest
import torch

from kernels.attention.nsa import compression, gates
from kernels.attention.sparse import combine, common, selection


@pytest.fixture(autouse=True)
def larger_tiles_in_the_interpreter(monkeypatch):
    """Triton's interpreter takes milliseconds a program, whatever its size."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(combine, "ROWS", 256)
        monkeypatch.setattr(compression, "ROW_ELEMENTS", 2**15)
        monkeypatch.setattr(compression, "BLOCK_W", 64)
        monkeypatch.setattr(compression, "BLOCK_T", 256)
        monkeypatch.setattr(gates, "ELEMENTS", 2**15)
        monkeypatch.setattr(common, "FLOAT32_ROWS", 64)
        monkeypatch.setattr(selection, "TOPK_ELEMENTS", 2**11)
