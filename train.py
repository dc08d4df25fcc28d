"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=N train.py` on N GPUs.

This file reads from top to bottom: tokenizer and data; validation; the disk; the run; what is shown.
training/run/settings.py has the settings and what of them is refused, training/run/resume.py finds where a run starts,
training/run/build.py builds the model and makes a step.
"""

import contextlib
import dataclasses
import json
import logging
import signal
import sys
import time
import typing
from collections import deque
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from tqdm import tqdm

from model import GATES, ModelConfig, Transformer
from training.attention_flags import kinds_at, spell_by_layer
from training.checkpoint.files import (
    SPARE_BYTES,
    check_is_for_a_run,
    check_is_shared,
    check_room,
    checkpoints,
    clear_leftovers,
    delete_old,
    tokenizer_of,
)
from training.checkpoint.manifest import verify_checkpoint, verify_weights
from training.checkpoint.saver import Saver
from training.checkpoint.weights import NO_COMPANIONS, Companions, find_weights, parameter_shapes, read_companions
from training.data.corpus import load_corpus
from training.data.loader import Batch, PackedLoader, check_can_validate, validation_batches
from training.data.show import show_batch
from training.data.tokenizer import load_tokenizer
from training.data.tokens import Store
from training.families import to_config_json
from training.host.errors import UserError
from training.host.files import only_run_in, replace_file, size_on_disk
from training.host.processes import Watchdog, command, outliving_its_output
from training.memory.cost_model import PackedDocuments
from training.memory.placement import set_kinds
from training.memory.planner import Plan
from training.optimizer import MasterAdamW
from training.parallel.tensor import check_matrix_sharing
from training.parallel.ulysses import check_sharing
from training.parallel.world import World, join_world
from training.plots import draw_at_end
from training.run.build import (
    NoTarget,
    NotFinite,
    Start,
    build,
    check_fits,
    choose_model,
    configure_machine,
    explain_out_of_memory,
    resolve_memory_budget,
    run_model,
    train_step,
)
from training.run.metrics import MetricsFile, is_spike, peak_flops, peak_memory_gib, set_aside
from training.run.resume import find_start, learning_rate_of, parallel_sizes_of, tokens_per_step
from training.run.settings import (
    CHECKPOINT_INTERVAL,
    KEPT_CHECKPOINTS,
    TrainConfig,
    check_config,
    given_settings,
    parse_interval,
)
from training.run.stopping import LONG_STEP_SECONDS, LooksBetweenBlocks, Stopped, promise_shutdown, stop_signals

logger = logging.getLogger("train")
PROMPT_TOKENS = 64
LONG_FIRST_STEP_SECONDS = 60.0  # of which compiling kernels is a small part
SAVED_BYTES_PER_SECOND = 5e8  # a slow disk's, before the first checkpoint has been measured
HANG_SECONDS = 600.0  # without an end of a step, or ten times as long as the last one where that is more
RETRY_SECONDS = 60  # from a checkpoint that failed to the next attempt


def choose_tokenizer(config: TrainConfig, checkpoint: Path | None) -> str:
    """The tokenizer to open: --tokenizer's, else what the weights of --init_from were trained with, else bytes.

    A resumed run whose file is no longer there takes the copy in its checkpoint.
    """
    if checkpoint and config.tokenizer not in (None, "bytes") and not Path(config.tokenizer).exists():
        own = checkpoint / "tokenizer.json"
        return str(own if own.is_file() else config.tokenizer)
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer or "bytes"
    return tokenizer_of(Path(config.init_from))


def companions_of(config: TrainConfig, start: Start) -> Companions:
    """What goes along with the weights into checkpoints: the tokenizer's files, and the ids that it ends texts with."""
    if config.tokenizer in (None, "bytes"):
        return NO_COMPANIONS
    own = None if start.checkpoint is None else start.checkpoint / "tokenizer.json"
    return read_companions(own if own is not None and own.is_file() else Path(str(config.tokenizer)))


def open_tokenizer(config: TrainConfig, start: Start):
    """Open the tokenizer of the run. A resumed run must have the one that it was trained with.

    Raises:
        UserError: the file is missing or invalid, or its content is not what the checkpoint's run had.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if start.checkpoint and start.tokenizer != tokenizer.identity:
        raise UserError(
            f"cannot resume: {start.checkpoint} was trained with tokenizer {start.tokenizer[:12]}, {tokenizer.name} is "
            f"{tokenizer.identity[:12]} (first digits of the files' SHA-256); give that --tokenizer"
        )
    return tokenizer


def load_data(config: TrainConfig, tokenizer, vocab_size: int, world: World):
    """Returns (loader of training batches, store of the held-out documents)."""
    store, held_out, packing = load_corpus(
        config.data, tokenizer, vocab_size, validation_fraction=config.validation_fraction,
        context_length=config.context_length, seed=config.seed, reasoning=config.chat_reasoning,
        packing=config.packing, overlong=config.overlong, weights=config.data_weights,
    )  # fmt: skip
    loader = PackedLoader(store, packing, config.batch_size, world.data_rank, world.data_size, read_ahead=True)
    loader.check_enough_for_step(config.gradient_accumulation_steps)
    if config.validation_sequences:
        check_can_validate(held_out, config.context_length, config.validation_sequences)
    return loader, held_out


def check_same_on_all_ranks(ours: dict, world: World) -> None:
    """Refuse settings or data, by name, that are not those of the main rank."""
    for name, value in world.broadcast(ours).items():
        if ours[name] != value:
            raise UserError(f"{name} is {ours[name]} on rank {world.rank} and {value} on rank 0; start all ranks alike")


@torch.no_grad()
def validate(
    model: Transformer, batches: typing.Iterable[Batch], world: World, stopping: typing.Callable[[], bool]
) -> float:
    """Mean loss per held-out token, over all ranks. Raises Stopped where `stopping`, which all ranks call, says so."""
    total, count = 0.0, 0
    for batch in batches:
        if stopping():
            raise Stopped
        batch = batch.slice(world.context_rank, world.context_size)
        total += float(run_model(model, batch, world, 1.0))
        count += batch.num_valid_tokens
    total, count = world.sum(total, count)
    return total / count


def checkpoint_bytes(config: TrainConfig, model_config: ModelConfig, device: torch.device) -> int:
    """Of one checkpoint on disk: bf16 weights on a GPU, float32 ones on a CPU; masters and two moments in float32."""
    weight = 2 if device.type == "cuda" else 4
    return model_config.num_parameters() * (weight + 12 * (config.save == "full")) + SPARE_BYTES


def check_disk(config: TrainConfig, start: Start, size: int) -> None:
    """Refuse a run whose checkpoints of `size` bytes will not fit on the disk; those there already count as free.

    Raises:
        UserError: there is no room for two checkpoints: the last one, and the one that takes its place.
    """
    output_dir = Path(config.output_dir)
    clear_leftovers(output_dir)
    found = checkpoints(output_dir, start.step)
    steps, seconds = parse_interval(config.checkpoint_interval or CHECKPOINT_INTERVAL)
    saves = config.max_steps - start.step if seconds else 1 + (config.max_steps - start.step - 1) // (steps or 10**9)
    kept = (config.keep_checkpoints or KEPT_CHECKPOINTS) + (config.validation_sequences > 0) + 1
    for count, is_enough in ((kept, False), (2, True)):
        try:
            check_room(output_dir, min(count, saves + len(found)) * size, size_on_disk(found))
            return
        except OSError as error:
            if is_enough:
                or_else = "choose another --output_dir" + ", or --save model" * (config.save == "full")
                raise UserError(f"{error.strerror}; free some space, {or_else}") from None
            logger.warning("%s: old checkpoints will be deleted before new ones are complete", error.strerror)


def choose_start(given: dict, world: World) -> tuple[TrainConfig, Start, ModelConfig]:
    """Settings, start and model of a run. Of a resumed run the checkpoint is the newest one without damage.

    What can be refused in seconds comes before the checkpoint's bytes are compared.
    """
    passed_over: dict[Path, str] = {}
    while True:
        config, start, changes = find_start(given, world, passed_over)
        check_same_on_all_ranks({"the checkpoint to go on from": str(start.checkpoint)}, world)
        model_config = choose_model(config, start.checkpoint)
        kinds = kinds_at(config, model_config, step=1)
        check_matrix_sharing(world.tensor_size, model_config)
        check_sharing(world.context_size, model_config, any(k.list_length for k in kinds), world.tensor_size)
        config = dataclasses.replace(config, tokenizer=choose_tokenizer(config, start.checkpoint))
        if start.checkpoint or config.init_from:
            find_weights(start.checkpoint or config.init_from, parameter_shapes(model_config), may_lack=GATES)
        open_tokenizer(config, start)
        if config.init_from and not (start.checkpoint or config.show_batch):
            verify_weights(config.init_from)
        try:
            if start.checkpoint:
                verify_checkpoint(start.checkpoint)  # reads every byte of the checkpoint
        except UserError as error:
            passed_over[start.checkpoint] = str(error)
            continue
        for path, why in passed_over.items():
            logger.warning("passed over %s: %s", path, why)
        for line in changes:
            logger.info("%s", line)
        return config, start, model_config


@dataclasses.dataclass
class Run:
    """What a run is made of, and how far it has come."""

    config: TrainConfig
    settings: dict  # that go into checkpoints: a budget of "auto" is resolved anew where a run resumes
    start: Start
    world: World
    model_config: ModelConfig
    tokenizer: typing.Any
    loader: PackedLoader
    held_out: Store
    model: Transformer
    optimizer: MasterAdamW
    plan: Plan
    saver: Saver
    metrics: MetricsFile | None  # of the main rank
    progress: tqdm
    watchdog: Watchdog
    received: list[int]  # numbers of the signals that ask this process to end
    looks: LooksBetweenBlocks
    # What the weights are of: the last step that was taken. A step that is dropped half way leaves all of this alone.
    done: int
    tokens: int
    position: dict  # the loader's state
    validation_loss: float | None
    saved: int  # the step of the last checkpoint
    saved_at: float  # when that was begun
    step_seconds: float  # of the last step; of the first what is predicted, 0 on a CPU
    look_seconds: float = 0.0  # from a signal to the end of such a step, at most
    has_promised: bool = False  # said within how many seconds a signal saves and ends the run
    skipped: int = 0  # steps whose loss or gradient was not finite
    stopped: bool = False
    is_unvalidated: bool = False  # a signal has ended the last validation
    recent_losses: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=100))

    def save(self) -> None:
        """Begin the checkpoint of the last step, unless it has been begun."""
        if self.config.save == "none" or self.saved == self.done:
            return
        self.saved, self.saved_at = self.done, time.monotonic()
        self.saver.begin(
            self.done, weights=self.optimizer.parameters, model_config=to_config_json(self.model_config),
            optimizer_state=self.optimizer.state_dict() if self.config.save == "full" else None,
            trainer_state={
                "tokens": self.tokens, "max_steps": self.config.max_steps, "cosine_steps": self.start.cosine_steps,
                "tokens_per_step": tokens_per_step(self.config, self.world), "ranks": self.world.data_size,
                "settings": self.settings, "tokenizer": self.tokenizer.identity,
                "validation_loss": self.validation_loss, "loader": self.position, "skipped": self.skipped,
            },
        )  # fmt: skip

    def stopping(self) -> bool:
        """Whether any rank has been asked to stop; the same on every rank, and a collective of them."""
        self.watch()
        return self.world.sum(float(bool(self.received)))[0] > 0

    def watch(self) -> None:
        """Print what this rank's threads do where `watch` is not called again for long: a rank hangs."""
        self.watchdog.expect(max(HANG_SECONDS, 10 * self.step_seconds))

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """In here a long step or validation ends between two blocks, by Stopped, once the run has been asked to end."""
        blocks = 2 * self.model_config.num_hidden_layers * self.config.gradient_accumulation_steps
        return self.looks.looking(self.looks.every_in(self.step_seconds, blocks))


def train(given: dict, world: World) -> int:
    """A run, from the checks to the final checkpoint and a sample; returns the process's exit status.

    Args:
        given: the settings that flags and --config give, by the names of TrainConfig's fields, and the world's parallel
            sizes, which a checkpoint's settings do not change any more.
    """
    output_dir = Path(TrainConfig(**given).output_dir)
    with contextlib.ExitStack() as stack:
        if not given.get("show_batch"):  # which writes nothing
            if world.is_main:
                check_is_for_a_run(output_dir)
                stack.enter_context(only_run_in(output_dir))
            check_is_shared(output_dir)
        # What can be refused in seconds comes before the data, which may take minutes to tokenise.
        config, start, model_config = choose_start(given, world)
        if start.step >= config.max_steps:
            logger.info("%s is of the last of %d steps: nothing is left to do", start.checkpoint, config.max_steps)
            if world.is_main:  # what a kill at the end has left undone
                draw_at_end(output_dir)
                if config.save != "none" and start.checkpoint:
                    clear_leftovers(output_dir)
                    delete_old(start.checkpoint, config.keep_checkpoints or KEPT_CHECKPOINTS)
            return 0
        if config.show_batch:
            show_next_batch(config, start, model_config, world)
            return 0
        run = set_up(config, start, model_config, world, stack)
        while run.done < config.max_steps and not run.stopped:
            values = take_step(run)
            if values is None:
                break
            validate_if_due(run, values)
            save_if_due(run, values)
        return end(run)


def show_next_batch(config: TrainConfig, start: Start, model_config: ModelConfig, world: World) -> None:
    """Print what the next step begins with, of a resumed run at its position in the data."""
    tokenizer = open_tokenizer(config, start)
    loader, _ = load_data(config, tokenizer, model_config.vocab_size, world)
    if start.checkpoint:
        loader.load_state_dict(start.loader)
    if world.is_main:
        print(show_batch(loader, tokenizer, color=sys.stdout.isatty()))


def set_up(
    config: TrainConfig, start: Start, model_config: ModelConfig, world: World, stack: contextlib.ExitStack
) -> Run:
    """All that a run needs, in output_dir, which no other run writes to until `stack` is closed."""
    settings, output_dir = dataclasses.asdict(config), Path(config.output_dir)
    config = dataclasses.replace(config, memory_budget=resolve_memory_budget(config, world.device))
    configure_machine(config, model_config, world)
    tokenizer = open_tokenizer(config, start)
    check_fits(config, model_config, world)
    if world.is_main and config.save != "none":
        check_disk(config, start, checkpoint_bytes(config, model_config, world.device))
    loader, held_out = load_data(config, tokenizer, model_config.vocab_size, world)
    check_same_on_all_ranks({**settings, **loader.state_dict()}, world)
    if start.checkpoint:
        loader.load_state_dict(start.loader)
    documents = PackedDocuments.average(
        *loader.document_lengths(), loader.longest_document,
        config.batch_size, world.data_size, config.gradient_accumulation_steps,
    )  # fmt: skip
    model, optimizer, plan = build(config, model_config, start, documents, world)
    metrics = None
    if world.is_main:
        try:
            replace_file(output_dir / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
            if config.resume == "no":
                set_aside(output_dir / "metrics.jsonl")
            metrics = MetricsFile(output_dir / "metrics.jsonl", start.step, config.tensorboard)
        except OSError as error:
            raise UserError(f"output_dir {output_dir} cannot be written to: {error}; choose another") from None
    saver = Saver(
        output_dir, config.keep_checkpoints or KEPT_CHECKPOINTS, start.checkpoint, companions_of(config, start)
    )
    stack.callback(saver.wait)  # an error ends the run once the checkpoint that was begun is complete
    received = stack.enter_context(stop_signals())
    watchdog = Watchdog()
    stack.callback(watchdog.cancel)
    describe(config, model_config, plan, loader, held_out, world)
    progress = tqdm(total=config.max_steps, initial=start.step, unit="step", disable=not world.is_main)
    return Run(
        config, settings, start, world, model_config, tokenizer, loader, held_out, model, optimizer, plan, saver,
        metrics, progress, watchdog, received, LooksBetweenBlocks(model.layers, received), done=start.step,
        tokens=start.tokens, position=loader.state_dict(), validation_loss=start.validation_loss,
        saved=start.step, saved_at=time.monotonic(), skipped=start.skipped,
        step_seconds=world.min(plan.seconds)[0] if world.device.type == "cuda" else 0.0,
    )  # fmt: skip


def describe(
    config: TrainConfig, model_config: ModelConfig, plan: Plan, loader: PackedLoader, held_out: Store, world: World
) -> None:
    """Log a run's settings, model and data."""
    logger.info("config: %s", json.dumps(dataclasses.asdict(config)))
    logger.info(
        "model: %s, %s parameters; attention: %s, kernel: %s; device: %s x %d (data x context x tensor: %d x %d x %d)",
        config.model_size or model_config.model_type, f"{model_config.num_parameters():,}", config.attention_type,
        plan.execution.attention_backend, world.device.type, world.size,
        world.data_size, world.context_size, world.tensor_size,
    )  # fmt: skip
    logger.info(
        "data: %s training tokens, %s held out; %s tokens a step", f"{loader.num_tokens:,}",
        f"{(held_out.lengths - 1).sum():,}", f"{tokens_per_step(config, world):,}",
    )  # fmt: skip


def take_step(run: Run) -> dict | None:
    """The next step. Returns its metrics; None where the run was asked to end and the step is dropped."""
    config, world, step, began = run.config, run.world, run.done + 1, time.perf_counter()
    run.watch()
    batches = run.loader.next_step(config.gradient_accumulation_steps)
    rate = learning_rate_of(step, config, run.start.cosine_steps)
    kinds = kinds_at(config, run.model_config, step)
    set_kinds(run.model, kinds)
    values = {"step": step, "learning_rate": rate, "epoch": run.loader.epoch, "loss": None}
    try:
        with run.looking():
            loss, norm = train_step(
                run.model, run.optimizer, batches, world, rate, config.max_grad_norm, run.saver.before_update
            )
        values |= {"loss": loss, "gradient_norm": norm}
        if is_spike(loss, run.recent_losses):
            values["is_spike"], usual = True, mean(run.recent_losses)
            logger.warning("step %d: loss %.3f is a spike above a mean of %.3f", step, loss, usual)
        run.recent_losses.append(loss)
    except Stopped:
        run.stopped = True
        return None
    except NoTarget:
        logger.warning("step %d has no token to predict, as in the middle of a prompt, and is left out", step)
    except NotFinite as error:
        leave_out(run, step, error)
    except torch.OutOfMemoryError as error:
        run.progress.close()  # ends the progress bar's line
        if world.size == 1:  # elsewhere the other ranks have gone on
            run.save()
        error.add_note(explain_out_of_memory(config, run.plan, world.device))
        raise
    seconds, step_tokens = time.perf_counter() - began, tokens_per_step(config, world)
    run.look_seconds = run.looks.longest_seconds() if run.step_seconds > LONG_STEP_SECONDS else seconds
    run.done, run.tokens, run.position = step, run.tokens + step_tokens, run.loader.state_dict()
    values |= {"seconds": seconds, "tokens": run.tokens, "tokens_per_second": step_tokens / seconds}
    if world.device.type == "cuda":
        values["peak_memory_gib"] = peak_memory_gib(world)
    if (gpu_flops := peak_flops(world.device)) is not None:
        forward = sum(run.model_config.forward_flops(batch.documents.lengths, kinds) for batch in batches)
        flops = 3 * world.sum(forward)[0] / world.size  # of a rank, on average
        values["mfu"] = flops / (world.context_size * world.tensor_size) / seconds / gpu_flops
    if config.selected_blocks_start is not None:
        values["selected_blocks"] = spell_by_layer([kind.selected_blocks for kind in kinds])
    return values


def leave_out(run: Run, step: int, error: NotFinite) -> None:
    """Go on without a step that is not finite, as often as the settings allow; raise UserError after that."""
    sources = ", ".join(run.loader.sources(run.position["next_sequence"], run.loader.next_sequence)[:10])
    if run.skipped < run.config.skip_nonfinite_steps:
        run.skipped += 1
        logger.warning("step %d: %s, left out; documents: %s", step, error, sources)
        return
    run.progress.close()
    run.save()  # of the weights before this step, which are finite or refused
    run.saver.wait()
    raise UserError(
        f"step {step}: {error}, stopped before the update; the last good checkpoint: {run.saver.last or 'none'}. "
        f"{'Go on from it' if run.saver.last else 'Start again'} with a lower --learning_rate, or leave such steps out "
        "with --skip_nonfinite_steps; "
        f"documents of the step: {sources}"
    ) from None


def validate_if_due(run: Run, values: dict) -> None:
    """Put a validation loss among a step's metrics, where it is time for one and nobody asks the run to end."""
    config, world = run.config, run.world
    last = run.done == config.max_steps
    if not config.validation_sequences or not (last or is_due(run.done, config.validation_interval)):
        return
    batches = validation_batches(
        run.held_out, config.context_length, config.batch_size, world.data_rank, world.data_size,
        limit=config.validation_sequences,
    )  # fmt: skip
    try:
        with run.looking():
            values["validation_loss"] = run.validation_loss = validate(run.model, batches, world, run.stopping)
    except Stopped:
        run.is_unvalidated = True
        logger.warning("the validation of step %d is left out", run.done)


def save_if_due(run: Run, values: dict) -> None:
    """Write and show a step's metrics, agree over the ranks whether the run ends, and begin the checkpoint that is due.

    The main rank's clock decides for all.
    """
    config, world, seconds = run.config, run.world, values["seconds"]
    interval_steps, interval_seconds = parse_interval(config.checkpoint_interval or CHECKPOINT_INTERVAL)
    since_save = time.monotonic() - run.saved_at
    due = is_due(run.done, interval_steps) or 0 < interval_seconds < since_save
    due = due or (run.saver.error is not None and since_save > RETRY_SECONDS)
    of_main_rank = (due, seconds) if world.is_main else (0, 0)
    signals, saves, run.step_seconds = world.sum(len(run.received), *of_main_rank)
    run.stopped = signals > 0
    if run.metrics is not None:
        run.metrics.write(**values)
        if not run.has_promised and (run.done > run.start.step + 1 or seconds > LONG_FIRST_STEP_SECONDS):
            run.has_promised = True
            size = checkpoint_bytes(config, run.model_config, world.device)
            save_seconds = run.saver.seconds or size / SAVED_BYTES_PER_SECOND
            promise_shutdown(run.look_seconds, save_seconds if config.save != "none" else 0.0)
        show(run.progress, values, "byte" if config.tokenizer == "bytes" else "token")
    if saves or run.stopped or run.done == config.max_steps:
        run.save()


def end(run: Run) -> int:
    """The last checkpoint and a sample; returns the process's exit status."""
    config = run.config
    run.progress.close()
    if run.stopped:
        run.save()
    if config.sample_tokens and not run.stopped:
        length = min(PROMPT_TOKENS, int(run.held_out.lengths[0]) - 1)  # without the document's end
        log_sample(run, run.held_out.read(0, 0, length))
    run.watchdog.cancel()
    run.saver.finish()
    if run.world.is_main and not run.stopped:
        draw_at_end(Path(config.output_dir))
    if run.stopped and (run.done < config.max_steps or run.is_unvalidated):
        [number] = run.world.min(-max(run.received, default=0))  # of the ranks that have been asked
        logger.info("%s: stopped after step %d of %d", signal.Signals(int(-number)).name, run.done, config.max_steps)
        return 128 - int(number)
    return 0


def is_due(step: int, interval: int) -> bool:
    """Whether something done every `interval` steps (0: never) falls on this one."""
    return interval > 0 and step % interval == 0


def show(progress: tqdm, values: dict, unit: str) -> None:
    """Show a step on the progress bar, and its validation on a line."""
    loss = values["loss"]
    shown = {"loss": "left out" if loss is None else f"{loss:.3f}", "tokens/s": f"{values['tokens_per_second']:,.0f}"}
    if "is_spike" in values:
        shown["loss"] += " (spike)"
    if "mfu" in values:
        shown["mfu"] = f"{values['mfu']:.1%}"
    if "peak_memory_gib" in values:
        shown["GiB"] = max(values["peak_memory_gib"])
    progress.set_postfix(shown)
    progress.update()
    if "validation_loss" in values:
        progress.write(f"step {values['step']}: validation loss {values['validation_loss']:.4f} nats per {unit}")


def log_sample(run: Run, prompt: np.ndarray) -> None:
    """Log what the model writes after `prompt`, held-out ids [tokens], until a signal comes. All ranks call this."""
    generator = torch.Generator(run.world.device).manual_seed(run.config.seed)
    ids_BT, written = torch.from_numpy(prompt).to(run.world.device)[None], []
    with torch.compiler.set_stance("force_eager"):  # each layer and length would be compiled anew
        for next_B1 in run.model.next_tokens(ids_BT, run.config.sample_tokens, temperature=0.8, generator=generator):
            written.append(int(next_B1))
            if run.stopping():
                break
    before, after = run.tokenizer.decode(prompt.tolist()), run.tokenizer.decode(written)
    logger.info("sample, after a held-out prompt:\n%s<<<the prompt ends here>>>%s", before, after)


@command
@outliving_its_output()
def main(argv: list[str]) -> int:
    """Returns the exit status: 0 of a finished run, 1 after an error, 128 + the number of a signal that stopped it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    given = given_settings(TrainConfig, argv, description=__doc__.splitlines()[0])
    config = TrainConfig(**given)
    check_config(config)
    sizes = parallel_sizes_of(given)
    with join_world(config.device, **sizes) as world:
        if not world.is_main:
            logging.disable(logging.WARNING)
        return train({**given, **sizes}, world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
