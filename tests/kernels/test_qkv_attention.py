"""The order in which some heads at a time are sent, attended to and received; results: tests of placement, ulysses."""

import pytest

from kernels.qkv_attention import _run_steps


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(0, "a0 b0 c0 a1 b1 c1 a2 b2 c2 a3 b3 c3"), (1, "a0 a1 b0 a2 b1 c0 a3 b2 c1 b3 c2 c3")],
)
def test_stages_of_a_step_run_beside_those_of_its_neighbours(ahead, expected):
    order = []

    def stage(name):
        def run(step, *given):
            assert given == (() if name == "a" else (chr(ord(name) - 1), step))
            order.append(f"{name}{step}")
            return name, step

        return run

    _run_steps(4, ahead, *map(stage, "abc"))
    assert " ".join(order) == expected
