"""A checkpoint saved and waited for."""

from pathlib import Path

from training.checkpoint.saver import Saver


def save_checkpoint(output_dir, step: int, keep: int = 2, **state) -> Path:
    """Save what `Saver.begin` takes; returns the checkpoint's folder."""
    saver = Saver(output_dir, keep)
    saver.begin(step, **state)
    saver.finish()
    return saver.last
