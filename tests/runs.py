"""Small runs of train.py, and what they left behind."""

import json
import zlib
from pathlib import Path

from safetensors.torch import load_file

from model import MODEL_SIZES, Transformer
from tests.checkpoints import save_checkpoint
from tests.shapes import reshape
from training.families.config_json import to_config_json
from training.host.files import write_file
from training.parallel.fsdp import copy_weights, initial_weights
from training.run.settings import TrainConfig, given_settings

ROOT = Path(__file__).parents[1]
GIB = 2**30
SMALL = ["--context_length", "64", "--batch_size", "2", "--sample_tokens", "0", "--device", "cpu"]
SPARSE = ["--attention_type", "sparse", "--dense_below", "64"]


def arguments(corpus, output_dir, *extra, steps=4):
    warmup = ["--warmup_steps", str(min(steps, 2))]
    return [
        "--data",
        corpus,
        "--output_dir",
        str(output_dir),
        "--max_steps",
        str(steps),
        *SMALL,
        *warmup,
        *extra,
    ]


def metrics(output_dir):
    return [
        json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    ]


def losses(output_dir):
    return [line["loss"] for line in metrics(output_dir)]


def weights(output_dir, step):
    return load_file(Path(output_dir) / f"step_{step:08d}" / "model.safetensors")


def weights_of_another_shape(folder, seed=1, **sizes):
    """A checkpoint of weights whose shape is no MODEL_SIZES entry's."""
    shape = {
        "intermediate_size": 200,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_theta": 5e6,
    }
    config = reshape(MODEL_SIZES["tiny"], **shape | sizes, max_position_embeddings=4096)
    model = Transformer(config)
    copy_weights(model, initial_weights(model, seed=seed))
    state = {"weights": model.state_dict(), "model_config": to_config_json(config)}
    return save_checkpoint(
        folder, 1, **state, optimizer_state=None, trainer_state={"tokenizer": "bytes"}
    )


def only_resume(output_dir, *extra):
    return ["--output_dir", str(output_dir), "--device", "cpu", "--resume", *extra]


def interrupt(run, step, lost):
    """Leave a run as if it had been stopped after `step`."""
    [later] = [path for path in run.glob("step_*") if int(path.name.split("_")[1]) > step]
    later.rename(lost)


def edit_trainer_json(path, edit):
    """Change a checkpoint's trainer.json, and the manifest with it."""
    trainer = json.loads((path / "trainer.json").read_text())
    edit(trainer["trainer_state"])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["trainer.json"] = write_file(
        path / "trainer.json", json.dumps(trainer).encode()
    )
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    (path / "manifest.json").write_text(json.dumps(manifest))


def trainer_state(run, step):
    return json.loads((run / f"step_{step:08d}" / "trainer.json").read_text())["trainer_state"]


def saved_settings(run, step):
    return trainer_state(run, step)["settings"]


def parse(argv):
    return TrainConfig(**given_settings(argv))
