"""Checkpoints of an older version go on, and start runs, with the losses that the version itself
reached.

tests/data/checkpoints_68216fa.tar.xz was made by commit 68216fa (2026-11-28) on a CPU, PyTorch 2.11:
five runs of four steps from random weights (`base`, seed 1) of the smallest size that their form
allows, each with

    train.py --data corpus.txt --init_from base --output_dir run --max_steps 4 --context_length 32
        --batch_size 2 --gradient_accumulation_steps 2 --warmup_steps 2 --learning_rate 0.01
        --sample_tokens 0 --validation_sequences 0 --checkpoint_interval 2 --device cpu

and, for `compact`, `--optimizer_state compact`; for `lora`, `--lora 2 --lora_targets
q_proj,v_proj,down_proj --learning_rate 1`. The archive has the checkpoints of step 2. `RESUMED` are
the losses of steps 3 and 4 as 68216fa resumed them, and `STARTED` is the loss of the first step of a
new run from their weights.
"""

import tarfile
from pathlib import Path

import pytest

import train
from tests.runs import losses, only_resume

ARCHIVE = Path(__file__).parent / "data" / "checkpoints_68216fa.tar.xz"
RESUMED = {
    "dense": [5.422083854675293, 5.310525894165039],
    "compact": [5.068391799926758, 4.696279525756836],
    "lora": [5.546700954437256, 5.538866996765137],
    "experts": [5.408506870269775, 5.311429500579834],
    "delta_nets": [5.44762659072876, 5.349408149719238],
}
STARTED = {
    "dense": 5.382697582244873,
    "compact": 4.9547319412231445,
    "lora": 5.535233497619629,
    "experts": 5.376442909240723,
    "delta_nets": 5.402186393737793,
}
ROUNDING = 1e-5  # other processors add float32 in another order


@pytest.fixture
def older(tmp_path, monkeypatch):
    """Unpacks the checkpoints and enters the folder that their relative paths start from."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", RESUMED)
def test_an_older_checkpoint_resumes(older, name):
    assert train.main(only_resume(f"{name}/run")) == 0
    assert losses(f"{name}/run") == pytest.approx(RESUMED[name], rel=ROUNDING)


@pytest.mark.parametrize("name", STARTED)
def test_an_older_checkpoint_starts_a_run(older, name):
    start = ["--data", "corpus.txt", "--init_from", f"{name}/run/step_00000002"]
    start += ["--output_dir", "new", "--save", "none", "--device", "cpu", "--max_steps", "1"]
    start += ["--context_length", "32", "--batch_size", "2"]
    start += ["--sample_tokens", "0", "--validation_sequences", "0"]
    assert train.main(start) == 0
    assert losses("new") == pytest.approx([STARTED[name]], rel=ROUNDING)
