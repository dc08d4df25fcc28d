from dataclasses import replace

import pytest
import torch

from model import MODEL_SIZES
from training.memory.machine import H200, measure_rates


def test_without_a_gpu_the_rates_are_an_h200s():
    assert measure_rates(MODEL_SIZES["4B"], torch.device("cpu"), 4096) is H200


@pytest.mark.gpu
@pytest.mark.parametrize("context_length", [16_384, 262_144])
def test_measured_rates_are_plausible(context_length):
    config = replace(MODEL_SIZES["4B"], attention_backend="cudnn")
    rates = measure_rates(config, torch.device("cuda"), context_length)
    assert 20e12 < rates.attention_backward_flops < 2 * rates.attention_forward_flops < 4e15
    assert 20e12 < rates.matrix_flops < 3e15
    assert 1e9 < rates.link_bytes < 500e9 < rates.memory_bytes < 20e12
