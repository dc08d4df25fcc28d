"""benchmarks.claims: a command's settings are runs that train.py takes, and its numbers are among
those printed."""

import shlex
import sys
from argparse import ArgumentParser

import pytest
import torch

from benchmarks import bench_preferences, bench_train_step
from benchmarks.claims import CLAIMS, FIRST
from training.parallel.world import World
from training.run import recipe

STEPS = {claim.command: claim for claim in CLAIMS if "bench_train_step" in claim.command}
KEYS = {
    "seconds",
    "predicted_seconds",
    "peak_gib",
    "predicted_gib",
    "host_gib",
    "tokens_per_second",
    "saving",
}


class Parsed(Exception):
    """Holds what a command has parsed."""


def parsed(module, command, monkeypatch):
    def parse_and_end(self, *arguments):
        raise Parsed(parse(self, *arguments))

    parse = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setattr(sys, "argv", shlex.split(command.partition(" -m benchmarks.")[2]))
    with pytest.raises(Parsed) as found:
        module.main()
    monkeypatch.undo()
    return found.value.args[0]


@pytest.mark.parametrize("claim", STEPS.values(), ids=lambda claim: claim.name)
def test_the_settings_of_a_step_are_a_run_of_train(claim, monkeypatch):
    arguments = parsed(bench_train_step, claim.command, monkeypatch)
    world = World(0, claim.gpus, torch.device("cuda"))
    monkeypatch.setattr(recipe, "check_library", lambda *_: None)
    assert arguments.context_parallel_size == claim.gpus and arguments.steps > 1
    for setting in [setting for setting in arguments.settings if not setting.startswith("peer")]:
        found = bench_train_step.recipe_of_setting(setting, arguments, world)
        assert found.memory_budget == setting.split("+")[0]
        linear = [name for name in setting.split("+") if name in ("fp8", "fp8-all")]
        assert found.linear_name == (linear or ["bf16"])[0]
        assert found.attention_type == ("sparse" if "sparse" in setting else "full")
        assert found.memory_budget == "auto" or found.host_budget is not None


def test_paths_name_a_setting_that_is_run_and_a_value_that_is_printed(monkeypatch):
    modules = {"bench_train_step": bench_train_step, "bench_preferences": bench_preferences}
    for claim in CLAIMS:
        for name in [name for name in modules if name in claim.command]:
            settings = parsed(modules[name], claim.command, monkeypatch).settings
            for path in filter(None, (claim.number, claim.predicted, claim.peer_number)):
                _, setting, key, *_ = path.split(" > ")
                assert setting in settings and key in KEYS | {"reference_of_step"}, claim


def test_claims_of_one_command_agree_and_the_first_exist():
    by_command: dict[str, set] = {}
    for claim in CLAIMS:
        by_command.setdefault(claim.command, set()).add((claim.machine, claim.seconds, claim.gpus))
    assert {len(found) for found in by_command.values()} == {1}
    assert all(any(claim.name.startswith(prefix) for claim in CLAIMS) for prefix in FIRST)
    assert {claim.machine for claim in CLAIMS} == {"h200", "cpu"}
    assert not [claim for claim in CLAIMS if ("torchrun" in claim.command) != (claim.gpus == 2)]
