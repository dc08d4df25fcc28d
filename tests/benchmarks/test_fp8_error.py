"""The experiment rounds as kernels.fp8 does, and one product at a time."""

import pytest
import torch

from benchmarks.experiments.fp8_error import ByProduct, Rounded
from kernels.fp8 import FP8
from kernels.linear import PLAIN
from tests.kernels.compare import outputs_and_gradients, random

INPUTS = [(2, 20, 48), (32, 48)]


@pytest.mark.parametrize("product", ["y", "dx", "dw"])
def test_each_product_is_rounded_alone(product):
    inputs = [random(*shape, seed=i).cpu() for i, shape in enumerate(INPUTS)]
    fp8, plain, all_three = (
        outputs_and_gradients(linear, inputs) for linear in (ByProduct(**{product: FP8("torch")}), PLAIN, FP8("torch"))
    )
    for name, found, exact, expected in zip(("y", "dx", "dw"), fp8, plain, all_three):
        torch.testing.assert_close(found, expected if name == product else exact)
        assert not torch.equal(expected, exact)


def test_rounding_rows_to_powers_of_two_is_fp8s_and_finer_types_err_less():
    inputs = [random(*shape, seed=i).cpu() for i, shape in enumerate(INPUTS)]
    exact, fp8 = PLAIN(*inputs), FP8("torch")(*inputs)
    torch.testing.assert_close(ByProduct(y=Rounded(is_power=True))(*inputs), fp8)
    for finer in (Rounded(torch.int8), Rounded(torch.int8, block=16, rotates=True)):
        assert 0 < (ByProduct(y=finer)(*inputs) - exact).norm() < 0.6 * (fp8 - exact).norm()
    assert (ByProduct(y=Rounded(torch.float8_e5m2))(*inputs) - exact).norm() > 1.5 * (fp8 - exact).norm()
