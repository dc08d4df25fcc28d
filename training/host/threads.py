"""Threads of OpenMP, which PyTorch has for each core of a CPU."""

import os
from collections.abc import Sequence
from pathlib import Path

# Files of NVIDIA's driver: on Linux, and on Linux within Windows.
DRIVERS = Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/dxg")
# How long a thread that waits for others spins before it sleeps. The first is for GNU's library,
# which wheels of PyTorch have: its own number where threads are more than cores, and else 300 times
# that. The second is for others.
LIMITS = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "passive"}


def limit_spinning(device: str) -> None:
    """Sets LIMITS in the environment, if no GPU computes and the user has set nothing of the kind.

    It must be called before torch is imported. Two threads on two busy cores spun for three
    quarters of a run's time.

    Args:
        device: cpu, cuda, or auto for a GPU if there is one.
    """
    has_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1") and any(
        map(Path.exists, DRIVERS)
    )
    computes_on_cpu = device == "cpu" or not has_gpu
    if computes_on_cpu and os.environ.keys().isdisjoint([*LIMITS, "KMP_BLOCKTIME"]):
        os.environ |= LIMITS


def device_of(words: Sequence[str]) -> str:
    """Returns what a command line gives as --device; auto if it has none."""
    joined = " ".join(words).replace("=", " ").split()
    places = [i for i, word in enumerate(joined[:-1]) if word == "--device"]
    return joined[places[-1] + 1] if places else "auto"
