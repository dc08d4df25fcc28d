import pytest

from tests.training.memory.test_profiler import step_of
from training.memory import reports
from training.memory.planner import make_plan
from training.memory.profiler import GIB
from training.memory.reports import smallest_gpus

CONTEXTS = (32_768, 65_536)


def test_the_smallest_gpu_is_the_smallest(monkeypatch):
    monkeypatch.setattr(reports, "COMPARED_CONTEXTS", CONTEXTS)
    step = step_of("0.6B", 1024, backend="cudnn", num_hidden_layers=6)
    found = smallest_gpus(step, 10 * GIB)
    assert list(found) == list(CONTEXTS) and list(found.values()) == sorted(found.values())
    for context_length, size in found.items():
        make_plan(step.at(context_length), size * GIB, 10 * GIB)
        with pytest.raises(ValueError, match="fit into"):
            make_plan(step.at(context_length), (size - 0.5) * GIB, 10 * GIB)
