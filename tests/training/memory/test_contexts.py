"""The picture of memory and seconds by context."""

from types import SimpleNamespace

import pytest

from tests.pictures import check_texts
from training.host.sizes import GIB
from training.memory import contexts


def plan_of(tokens, seconds):
    """A plan as far as it is drawn: 20 GiB of 23, and 90 on the host."""
    step = SimpleNamespace(tokens=tokens, unplanned=lambda placement, loss_impl: None)
    return SimpleNamespace(
        step=step, peak=SimpleNamespace(bytes=20 * GIB), host_bytes=90 * GIB, gpu_budget=23 * GIB,
        host_budget=96 * GIB, seconds=seconds,
    )  # fmt: skip


@pytest.mark.parametrize(
    "seconds",
    [{4096 * 2**i: 0.244 * 3.6**i for i in range(8)} | {974_848: 5391.0}, {512: 0.001}, {4096: 1.0, 9000: 1.2},
     {4096: 90_000.0, 8192: 200_000.0}],
)  # fmt: skip
def test_texts_stay_inside_their_axes(seconds, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        contexts, "fullest_stage", lambda step, _: SimpleNamespace(bytes=step.tokens * 2**20)
    )
    monkeypatch.setattr(contexts, "save_picture", lambda figure, path: drawn.append(figure))
    contexts.draw_contexts(
        tmp_path,
        "4B on RTX4090; its speed is an H200's",
        {n: plan_of(n, s) for n, s in seconds.items()},
    )
    check_texts(drawn[0])
