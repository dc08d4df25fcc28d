"""Numbers of chosen blocks by layer."""

from argparse import Namespace
from dataclasses import replace

import pytest

from kernels.attention.full import FULL
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from model import MODEL_SIZES
from training.host.errors import UserError
from training.memory.kinds import (
    FLAGS,
    kinds_of,
    numbers_by_layer,
    spell_by_layer,
)


@pytest.mark.parametrize(("text", "numbers", "short"), [
    ("32", [32] * 4, "32"),
    ("0", [0] * 4, "0"),
    ("64x2,32", [64, 64, 32, 32], "64x2,32"),
    ("64,64,48,32", [64, 64, 48, 32], "64x2,48,32"),
    ("64x3,32x1", [64, 64, 64, 32], "64x3,32"),
    ("8,4", [8, 4, 4, 4], "8,4"),
])  # fmt: skip
def test_numbers_by_layer(text, numbers, short):
    assert numbers_by_layer("selected_blocks", text, 4) == numbers
    assert (
        spell_by_layer(numbers) == short
        and numbers_by_layer("selected_blocks", short, 4) == numbers
    )


@pytest.mark.parametrize(
    "text",
    ["", "-1", "8,", "8x", "8x0,4", "x4", "8 x4", "many", "123456", "8x2,4x1", "8x5", "8,8,8,8,8"],
)
def test_other_forms_are_refused(text):
    with pytest.raises(UserError, match=r"must be a number|names \d layers, the model has 4"):
        numbers_by_layer("selected_blocks", text, 4)


def test_layers_that_attend_to_everything_are_set_and_windows_keep_their_kind():
    flags = Namespace(attention_type="sparse", context_length=None, **dict.fromkeys(FLAGS))
    window = Window(64)
    shape = replace(MODEL_SIZES["tiny"], num_hidden_layers=4).with_kinds(window, FULL)
    assert kinds_of(flags, shape) == (window, Sparse()) * 2
    windows = shape.with_kinds(window)
    with pytest.raises(
        UserError, match="sparse has no effect on a model whose layers all attend by window;"
    ):
        kinds_of(flags, windows)
    assert (
        kinds_of(Namespace(**{**vars(flags), "attention_type": "full"}), windows) == (window,) * 4
    )
