"""The installed package: kernels/ under the name fathom_kernels, alone and beside another
`kernels`."""

import ast
import functools
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import kernels
from kernels.attention.sparse.sparse_attention import HEAD_DIMS

ROOT = Path(__file__).parents[2]
REQUIRED = {"torch", "triton"}
OPTIONAL = {"flash_attn", "transformers"}  # imported where they are used
PROGRAM = """
import sys
import fathom_kernels, kernels, torch, transformers
from transformers.utils.import_utils import is_kernels_available
assert kernels.IS_ANOTHER and not is_kernels_available() and "model" not in sys.modules
for name in fathom_kernels.__all__:
    assert getattr(fathom_kernels, name).__module__.startswith("fathom_kernels."), name
x = torch.randn(6, 2, 8, requires_grad=True)
out = fathom_kernels.packed_attention(x, x[:, :1], x[:, :1], torch.tensor([0, 4, 6]))
torch.testing.assert_close(out[4:], fathom_kernels.packed_attention(x[None, 4:], x[None, 4:, :1], x[None, 4:, :1])[0])
fathom_kernels.register_attention()
assert "fathom_sparse" in transformers.AttentionInterface().valid_keys()
"""


def test_files_of_kernels_import_none_of_the_checkout():
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            unknown = (
                {name.split(".")[0] for name in names}
                - REQUIRED
                - OPTIONAL
                - sys.stdlib_module_names
            )
            assert not unknown, f"{path} imports {unknown}"


def test_the_wheel_has_fathom_kernels_alone_and_works_beside_another_kernels(tmp_path):
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    # as pip does, in fewer processes
    build = "from setuptools import build_meta; build_meta.build_wheel('wheels')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = (tmp_path / "wheels").iterdir()
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        (metadata,) = (
            archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")
        )
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"fathom_kernels"}
    files = {
        path.relative_to(installed / "fathom_kernels")
        for path in installed.rglob("fathom_kernels/**/*.py")
    }
    assert files == {
        path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.py")
    }
    lines = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert {line.rstrip("<>=.,0123456789") for line in lines} == REQUIRED
    assert f"\nVersion: {kernels.__version__}\n" in metadata

    (elsewhere / "kernels").mkdir(parents=True)
    (elsewhere / "kernels/__init__.py").write_text("IS_ANOTHER = True\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (elsewhere, installed)))}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=elsewhere, env=environment, check=True)


def test_version_is_the_newest_of_the_changelog_and_requirements_agree():
    versions = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == kernels.__version__
    assert versions == sorted(
        versions, key=lambda version: [*map(int, version.split("."))], reverse=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*project["dependencies"]} <= {*(ROOT / "requirements.txt").read_text().splitlines()}


def test_a_checkout_hands_on_the_other_kernels(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("from kernels.their_file import NUMBER\n")
    (tmp_path / "their_file.py").write_text("NUMBER = 7\n")
    monkeypatch.setattr(kernels, "__path__", [kernels.__path__[0], str(tmp_path)])
    monkeypatch.setattr(
        kernels, "_hugging_face", functools.cache(kernels._hugging_face.__wrapped__)
    )
    assert kernels.NUMBER == importlib.import_module("kernels.their_file").NUMBER == 7
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = kernels.unknown


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["losses", "transformers_trainer"])
def test_examples_run(name, gpu, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fathom_kernels", kernels)
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: int(gpu)
    )  # Trainer would copy the model to all
    with torch.random.fork_rng():
        names = runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "plain" in said if name == "losses" else "'train_loss'" in said
    assert (
        name == "losses" or names["config"].head_dim in HEAD_DIMS
    )  # a GPU's kernels take no other
