"""The experiments round as kernels.fp8 does, and their kernels as their roundings."""

import pytest
import torch

from benchmarks.experiments import int8_products
from benchmarks.experiments.fp8_error import Rounded
from kernels.fp8 import FP8
from kernels.linear import PLAIN
from kernels.mixed import Mixed
from tests.kernels.compare import DTYPES, random

INPUTS = [(2, 20, 48), (32, 48)]


def test_rounding_rows_to_powers_of_two_is_fp8s_and_finer_types_err_less():
    inputs = [random(*shape, seed=i).cpu() for i, shape in enumerate(INPUTS)]
    exact, fp8 = PLAIN(*inputs), FP8("torch")(*inputs)
    torch.testing.assert_close(Mixed(y=Rounded(is_power=True))(*inputs), fp8)
    for finer in (Rounded(torch.int8), Rounded(torch.int8, block=16, rotates=True)):
        assert 0 < (Mixed(y=finer)(*inputs) - exact).norm() < 0.6 * (fp8 - exact).norm()
    assert (Mixed(y=Rounded(torch.float8_e5m2))(*inputs) - exact).norm() > 1.5 * (fp8 - exact).norm()


@pytest.mark.parametrize(("M", "K", "N"), [(130, 192, 48), (5, 1088, 300)])
def test_the_kernels_of_int8_round_and_multiply_as_the_experiment_does(M, K, N):
    x, weight = (random(*shape, seed=i, dtype=DTYPES[0]) for i, shape in enumerate([(M, K), (N, K)]))
    x[:, 3] *= 30
    expected = Rounded(torch.int8, rotates=True).forward(x, weight)
    factors = int8_products.factor(x), int8_products.factor(weight)
    for tile in int8_products.TILES:
        found = int8_products.product(*factors, x.dtype, tile)
        assert (found - expected).norm() <= 2e-3 * expected.norm()
