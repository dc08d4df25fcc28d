"""A run as it was decided before its data are read: values of each room, and what is checked of
them on this machine.

training/run/decide.py makes a recipe from flags. Nothing here reads a flag or a folder's headers.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from training.checkpoint.carried import NOTHING, Carried
from training.checkpoint.decide import Saving
from training.checkpoint.files import checkpoints
from training.checkpoint.manifest import settings_beside, verify_weights
from training.checkpoint.pieces import Entry
from training.checkpoint.weights import Companions
from training.data.decide import DataRecipe, Tokenizer
from training.data.sources import Reading
from training.data.tokenizer import ByteTokenizer
from training.families.decide import Source
from training.families.lora import ADAPTER_CONFIG, FROZEN_BITS, Adapters, to_adapter_config
from training.flags import LARGE
from training.host.errors import UserError
from training.memory.decide import StepRecipe
from training.memory.kinds import check_head_dim
from training.memory.machine import gpu_budget
from training.memory.step import Scoring
from training.objectives.decide import Aim
from training.objectives.scored import Objective, scoring
from training.objectives.stored import TEACHER, Stored
from training.optim.decide import OptimRecipe
from training.optim.quantized import check_library
from training.parallel.world import World
from training.run.resume import how_to_go_on
from training.run.schedule import Progress, Schedule


@dataclass(frozen=True)
class Start:
    """Place where a run starts, and its weights."""

    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None  # the run goes on from it; None: it starts at its first step
    source: Source | None = None  # None: weights are drawn
    weights: dict[str, Entry] = field(default_factory=dict)  # where the source has each weight
    # The part of the source that is not trained and goes into checkpoints.
    carried: Carried = NOTHING
    declared_context: int = LARGE  # tokens of a text that the weights of --init_from are made for
    extends_context: bool = False  # beyond the context of the source
    seed: int = 0  # draws the initial weights, and the sample


@dataclass(frozen=True)
class Outputs:
    """The folder of a run, and what gets its metrics beside metrics.jsonl."""

    folder: Path
    goes_on: bool  # the run that is in the folder; False: it is refused
    trackers: dict[str, bool | str]  # values of their flags, such as a project, by flags' names


@dataclass(frozen=True)
class Recipe(StepRecipe):
    """Decisions of a run before its data are read and its memory is planned."""

    model_name: str
    attention_type: str
    memory_budget: str | None  # None: nothing is planned, as on a CPU
    host_budget: float | None  # bytes that each process may pin; None: a share of what is free
    recomputes_blocks: bool  # without a plan: blocks keep their input alone
    compiles_blocks: bool
    for_gpus: tuple[str, ...]  # names of given settings that have no effect on a CPU
    wait_minutes: int | None  # of a process for others; None: COLLECTIVE_TIMEOUT
    aim: Aim
    data: DataRecipe
    optim: OptimRecipe
    schedule: Schedule
    saving: Saving
    outputs: Outputs
    start: Start
    settings: dict  # all settings by name, for config.json and checkpoints
    flags_to_go_on: tuple[str, ...]  # words of flags that a checkpoint does not have
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)

    @property
    def objective(self) -> Objective | None:
        """The objective of a step; None: the loss of the next tokens."""
        return self.aim.objective

    @cached_property  # one reader, which knows later what it has read
    def reading(self) -> Reading:
        """Ways by which files become documents."""
        rows = self.aim.reader(self.tokenizer.eos_id, may_lack=self.data.only_shows)
        return self.data.reading._replace(rows=rows)

    @property
    def scoring(self) -> Scoring:
        """The part of a step that the objective takes, for its plan."""
        if teacher := self.aim.folders.get(TEACHER):
            return Scoring(token_bytes=Stored.read(teacher).word_bytes)
        reads_base = isinstance(self.trained, Adapters) and "reference" not in self.aim.folders
        return scoring(self.objective, reads_base)

    def record(self, max_steps: int, state_format: str) -> dict:
        """Returns the settings by name, with what data and plan have settled: the last step and the
        format of the state."""
        return self.settings | {"max_steps": max_steps, "optimizer_state": state_format}

    def companions(self) -> Companions:
        """Returns what is carried; adapters' configuration, and settings of config.json that go
        along with them."""
        carried, source = self.start.carried, self.start.source
        if not isinstance(self.trained, Adapters):
            return Companions(carried=carried)
        assert source is not None, "adapters adapt something"
        base = source.base.absolute()
        content = json.dumps(to_adapter_config(self.trained, base), indent=2) + "\n"
        settings = settings_beside(self.trained, base) | {FROZEN_BITS: self.frozen_bits}
        return Companions({ADAPTER_CONFIG: content.encode()}, settings, carried)


def check_is_free(outputs: Outputs) -> None:
    """Refuses an output_dir with a run in it, unless that goes on.

    It comes after all that is wrong with flags, folders and the machine: the usual output_dir is
    taken from the second run on, and another one is not what somebody looks for who gave a wrong
    folder of weights.
    """
    earlier = checkpoints(outputs.folder)
    if earlier and not outputs.goes_on:
        raise UserError(f"{earlier[-1]} is already there: {how_to_go_on(earlier)}")


def verify_start(start: Start) -> None:
    """Compares the weights that a run starts from with their checksums: every byte is read."""
    if start.source and start.checkpoint is None:
        verify_weights(start.source.folder, start.weights)


def check_machine(recipe: Recipe, world: World) -> None:
    """Refuses what this machine cannot run, and a memory budget that is not free, before anything
    takes time."""
    device = world.device
    if device.type == "cuda" and recipe.impl == "torch" and recipe.memory_budget is not None:
        raise UserError(
            "kernels torch takes more memory than plans count; "
            "use auto, or --gradient_checkpointing"
        )
    if recipe.for_gpus and device.type != "cuda":
        raise UserError(f"{recipe.for_gpus[0]} has no effect on a CPU; drop it")
    if recipe.wait_minutes is not None and world.size == 1:
        raise UserError(
            "collective_timeout has no effect on one process, which waits for nobody; drop it"
        )
    if recipe.impl == "triton" and device.type != "cuda":
        raise UserError('kernels "triton" needs a CUDA GPU; use auto')
    if recipe.impl != "torch":
        check_head_dim(recipe.kinds, recipe.model.attention.head_dim, device)
    recipe.backend(device)  # refuses a backend that is not there
    recipe.check_linear(device)
    if recipe.frozen_bits < 16:
        check_library(f"lora_bits {recipe.frozen_bits}")
    if recipe.memory_budget is not None:
        gpu_budget(recipe.memory_budget, device)
