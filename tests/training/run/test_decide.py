"""Flags are read by the functions that decide, and by nothing after them."""

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path

from model import ModelConfig
from training.run.settings import TrainConfig

ROOT = Path(__file__).parents[3]
# Rooms of a run of train.py. Other commands, in rooms above them, have flags of their own.
ROOMS = ["run", "objectives", "memory", "checkpoint", "optim", "data", "parallel", "families"]
# Files that declare flags, or decide by them. resume.py decides by those that a checkpoint has, and
# memory/kinds.py by those of every command.
DECIDING = ["flags.py", "decide.py", "settings.py", "profile_flags.py", "resume.py", "kinds.py"]
NAMES = {"flags", "config", "settings", "record"}  # of variables that hold flags


def reads_of_flags(source: str) -> list[str]:
    """Returns the places where flags of train.py are read, or their classes are named."""
    classes = {kind.__name__ for kind in TrainConfig.__mro__ if is_dataclass(kind)}
    # A variable `config` is a ModelConfig in most places.
    names = {each.name for each in fields(TrainConfig)} - {
        each.name for each in fields(ModelConfig)
    }
    reads = []
    for node in ast.walk(ast.parse(source)):
        is_class = isinstance(node, ast.Name) and node.id in classes
        holder = None
        if isinstance(node, ast.Attribute) and node.attr in names:
            holder = node.value
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and isinstance(node.slice, ast.Constant)
            and node.slice.value in names
        ):
            holder = node.value
        is_read = (isinstance(holder, ast.Name) and holder.id in NAMES) or (
            isinstance(holder, ast.Attribute) and holder.attr in NAMES
        )
        if is_class or is_read:
            reads.append(ast.unparse(node))
    return reads


def test_nothing_reads_a_flag_after_the_decisions():
    files = [ROOT / "train.py"]
    for room in ROOMS:
        files += ROOT.glob(f"training/{room}/**/*.py")
    after = [file for file in files if file.name not in (*DECIDING, "__main__.py")]
    # The answers of profile_memory.py, which reads its flags as it goes.
    after.remove(ROOT / "training/memory/reports.py")
    assert len(after) > 60
    reads = {str(file.relative_to(ROOT)): reads_of_flags(file.read_text()) for file in after}
    assert {file: found for file, found in reads.items() if found} == {}


def test_reads_of_flags_are_found():
    for source, found in (
        ("run.config.max_grad_norm", ["run.config.max_grad_norm"]),
        ("def f(config: TrainConfig): return config.seed", ["TrainConfig", "config.seed"]),
        ("settings['output_dir']", ["settings['output_dir']"]),
        ("settings['output_dir'] = 1", []),
        ("config.hidden_size, recipe.saving.output_dir", []),
    ):
        assert sorted(reads_of_flags(source)) == found, source
