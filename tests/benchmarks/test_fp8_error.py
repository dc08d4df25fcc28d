"""The experiment rounds as kernels.fp8 does."""

import torch

from benchmarks.experiments.fp8_error import Rounded
from kernels.fp8 import FP8
from kernels.linear import PLAIN
from kernels.mixed import Mixed
from tests.kernels.compare import random

INPUTS = [(2, 20, 48), (32, 48)]


def test_rounding_rows_to_powers_of_two_is_fp8s_and_finer_types_err_less():
    inputs = [random(*shape, seed=i).cpu() for i, shape in enumerate(INPUTS)]
    exact, fp8 = PLAIN(*inputs), FP8("torch")(*inputs)
    torch.testing.assert_close(Mixed(y=Rounded(is_power=True))(*inputs), fp8)
    for finer in (Rounded(torch.int8), Rounded(torch.int8, block=16, rotates=True)):
        assert 0 < (Mixed(y=finer)(*inputs) - exact).norm() < 0.6 * (fp8 - exact).norm()
    assert (Mixed(y=Rounded(torch.float8_e5m2))(*inputs) - exact).norm() > 1.5 * (
        fp8 - exact
    ).norm()
