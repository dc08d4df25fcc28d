"""Flags of the mesh of ranks. No torch is imported here: --help is to be quick."""

from dataclasses import dataclass

from training.flags import flag

COLLECTIVE_TIMEOUT = 10  # minutes


@dataclass
class MeshFlags:
    """Sizes of the mesh."""

    context_parallel_size: int = flag(
        1, "GPUs that share each sequence", least=1, most=2**20, group="several GPUs"
    )
    tensor_parallel_size: int = flag(1, "GPUs that share each matrix", least=1, most=2**20)
    replicate: int = flag(
        1, "copies of the weights; 1 per machine spares a slow network", least=1, most=2**20
    )


@dataclass
class WaitFlags:
    """Limits of what a rank waits for others."""

    collective_timeout: int | None = flag(
        None,
        f"minutes to wait for a process; default: {COLLECTIVE_TIMEOUT}",
        least=1,
        most=2**20,
        group="several GPUs",
    )
