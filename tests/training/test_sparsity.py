"""Numbers of chosen blocks by layer."""

import pytest

from training.errors import UserError
from training.sparsity import numbers_by_layer, spell_by_layer


@pytest.mark.parametrize(
    ("text", "numbers", "short"),
    [
        ("32", [32] * 4, "32"),
        ("0", [0] * 4, "0"),
        ("64x2,32", [64, 64, 32, 32], "64x2,32"),
        ("64,64,48,32", [64, 64, 48, 32], "64x2,48,32"),
        ("64x3,32x1", [64, 64, 64, 32], "64x3,32"),
        ("8,4", [8, 4, 4, 4], "8,4"),
    ],
)
def test_numbers_by_layer(text, numbers, short):
    assert numbers_by_layer("selected_blocks", text, 4) == numbers
    assert spell_by_layer(numbers) == short and numbers_by_layer("selected_blocks", short, 4) == numbers


@pytest.mark.parametrize(
    "text", ["", "-1", "8,", "8x", "8x0,4", "x4", "8 x4", "many", "123456", "8x2,4x1", "8x5", "8,8,8,8,8"]
)
def test_other_forms_are_refused(text):
    with pytest.raises(UserError, match=r"must be a number|names \d layers, the model has 4"):
        numbers_by_layer("selected_blocks", text, 4)
