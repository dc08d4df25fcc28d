"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=N train.py` on N GPUs.

This file reads from top to bottom: a run from its start to its end; its parts; its data; a step;
validation, metrics and checkpoints after a step; the end. The rest is in training/run:

- settings.py has the flags, recipe.py all that is decided before the data are read, resume.py what
  a checkpoint says;
- build.py makes the model and its memory plan;
- parts.py has the parts of a run, its checkpoints and its sample, step.py the arithmetic of a step;
- stopping.py has early ends, metrics.py what is shown and written of each step.
"""

import sys

from training.checkpoint.flags import KEPT_CHECKPOINTS
from training.flags import answer_early
from training.parallel.flags import COLLECTIVE_TIMEOUT
from training.run.settings import TrainConfig, check_config, given_settings

if __name__ == "__main__":
    answer_early(given_settings)

import contextlib
import dataclasses
import gc
import logging
import time
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from training.checkpoint.files import (
    check_is_for_a_run,
    check_is_shared,
    clear_leftovers,
    delete_old,
    tokenizer_of,
)
from training.checkpoint.ranks import failing_together
from training.checkpoint.saver import Saver
from training.checkpoint.weights import (
    NO_COMPANIONS,
    Companions,
    folders_of,
    left_out,
    read_beside_weights,
    read_companions,
)
from training.data.chat import stop_ids
from training.data.corpus import load_corpus
from training.data.loader import (
    PackedLoader,
    check_can_validate,
    count_sequences,
    prompts_of,
    validation_batches,
)
from training.data.show import read_batch, show_batch
from training.data.show_html import SHOWN_ON_A_PAGE, write_batch
from training.data.sources import Reading
from training.data.tokens import Store
from training.families.rope import beyond
from training.host.errors import UserError
from training.host.files import check_paths, only_run_in
from training.host.processes import command, outliving_its_output
from training.memory.cost_model import forward_flops
from training.memory.step import PackedDocuments
from training.objectives.choose import complete, row_reader, stored_of
from training.objectives.stored import Stored, attention_in_words
from training.parallel.world import World, join_world
from training.plots.curves import draw_at_end
from training.plots.panels import unit_of
from training.run.build import build, check_fits, explain_out_of_memory
from training.run.metrics import (
    Display,
    also_logged_into,
    describe,
    is_spike,
    open_metrics,
    own_amounts,
    summed_metrics,
)
from training.run.parts import (
    Run,
    check_disk,
    checkpoint_bytes,
    is_save_due,
    log_sample,
    open_report,
)
from training.run.recipe import (
    Recipe,
    check_is_free,
    check_machine,
    check_same_on_all_ranks,
    count_steps,
    decide,
    verify_start,
)
from training.run.report import recorded_warnings
from training.run.resume import (
    Progress,
    after_a_stop,
    learning_rate_of,
    parallel_sizes_of,
    tokens_per_step,
)
from training.run.step import NoTarget, NotFinite, NotRead, train_step, validate
from training.run.stopping import Stopped, Stopping, exit_with, stop_signals

logger = logging.getLogger("train")


@command
@outliving_its_output()
def main(argv: list[str]) -> int:
    """Returns the exit status: 0 of a finished run, 1 after an error, 128 + the number of a signal
    that stopped it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    given = given_settings(argv)
    config = TrainConfig(**given)
    check_config(config, given)
    sizes = parallel_sizes_of(given)
    with (
        join_world(config.device, **sizes) as world,
        also_logged_into(config.log_file if world.is_main else None),
    ):
        if not world.is_main:
            logging.disable(logging.WARNING)
        try:
            return train({**given, **sizes}, world)
        except KeyboardInterrupt:  # before the steps, in which `stop_signals` notes them
            there = f"--resume goes on from a checkpoint in {config.output_dir}, if there is one"
            logger.info("interrupted: %s; otherwise the same command starts anew", there)
            raise


def train(given: dict, world: World) -> int:
    """A run, from the checks to the final checkpoint and a sample; returns the process's exit
    status.

    `given` are the settings of flags and --config, by the names of TrainConfig's fields, and the
    world's parallel sizes, which a checkpoint's settings do not change any more.
    """
    output_dir = Path(TrainConfig(**given).output_dir)
    with contextlib.ExitStack() as stack:
        if not given.get("show_batch"):  # it writes nothing
            if world.is_main:
                check_is_for_a_run(output_dir)
                stack.enter_context(only_run_in(output_dir))
                clear_leftovers(output_dir)
            check_is_shared(output_dir)
        warnings = stack.enter_context(recorded_warnings())
        # Refusals that take seconds come before the data, which may take minutes to tokenise.
        recipe = decide(given, world)
        if recipe.progress.is_complete and not owes_validation(recipe.config, recipe.progress):
            finish_again(recipe, world)
            return 0
        if recipe.config.show_batch:
            show(recipe, world)
            return 0
        run = set_up(recipe, world, stack)
        open_report(run, warnings, stack)
        try:
            if owes_validation(run.config, run.progress):
                make_up_validation(run)
            while not (run.progress.is_complete or run.stopped):
                values = take_step(run)
                if values is None:
                    break
                validate_if_due(run, values)
                save_if_due(run, values)
        except Exception:
            run.save_after_error()
            raise
        return end(run)


def finish_again(recipe: Recipe, world: World) -> None:
    """Do what a kill at the end of the run may have left undone."""
    config, checkpoint = recipe.config, recipe.checkpoint
    logger.info(
        "%s is of the last of %d steps: nothing is left to do",
        checkpoint,
        recipe.progress.max_steps,
    )
    if world.is_main:
        draw_at_end(Path(config.output_dir))
        if config.save != "none" and checkpoint:
            delete_old(checkpoint, config.keep_checkpoints or KEPT_CHECKPOINTS)


def show(recipe: Recipe, world: World) -> None:
    """Print the batch that a run would begin with, or go on with, or write it as a page."""
    file, reading = recipe.config.show_batch, reading_of(recipe)
    loader, _ = open_data(recipe, world, reading)
    if not world.is_main:
        return
    if isinstance(file, str):
        write_batch(Path(file), read_batch(loader, recipe.tokenizer, SHOWN_ON_A_PAGE, reading.rows))
        print(file)
    else:
        print(show_batch(loader, recipe.tokenizer, sys.stdout.isatty(), reading.rows))


def set_up(recipe: Recipe, world: World, stack: contextlib.ExitStack) -> Run:
    """Make all that a run needs. No other run writes to its output_dir until `stack` is closed."""
    config, first_step = recipe.config, recipe.progress.step
    check_machine(recipe, world)
    check_fits(recipe, world)
    check_paths({"data": config.data, "validation_data": config.validation_data})
    for folder in filter(
        None, (config.reference_logprobs, config.old_logprobs, config.teacher_logprobs)
    ):
        Stored.read(folder)  # refuses a folder that holds none
    check_is_free(recipe)
    verify_start(recipe)
    saves, size = world.is_main and config.save != "none", checkpoint_bytes(recipe, world)
    if saves:
        check_disk(recipe, recipe.progress, size)
    loader, held_out = open_data(recipe, world, reading_of(recipe))
    progress = count_steps(recipe, loader)
    companions = companions_of(recipe, loader)
    documents = PackedDocuments.average(
        *loader.packing.document_lengths(), loader.packing.longest_document,
        config.batch_size, world.data_size, config.gradient_accumulation_steps,
    ).with_prompts(*prompts_of(loader.store))  # fmt: skip
    model, optimizer, plan = build(recipe, documents, world)
    state_format = plan.execution.state_format
    if saves and (larger := checkpoint_bytes(recipe, world, state_format)) > size:
        check_disk(recipe, progress, larger)
    settings = recipe.settings(progress.max_steps, state_format) | {
        "memory_budget": recipe.memory_budget
    }
    metrics = open_metrics(settings, first_step, stack) if world.is_main else None
    saver = Saver(
        Path(config.output_dir),
        config.keep_checkpoints or KEPT_CHECKPOINTS,
        recipe.checkpoint,
        companions,
    )
    stack.callback(
        saver.wait
    )  # an error ends the run once the checkpoint that was begun is complete
    received = stack.enter_context(stop_signals())
    seconds = world.min(plan.seconds)[0] if world.device.type == "cuda" else 0.0
    stopping = Stopping(received, world, model.layers, config.gradient_accumulation_steps, seconds)
    stack.callback(stopping.watchdog.cancel)
    describe(settings, recipe.model, plan, world)
    gc.collect()
    # a full collection would look at all that was imported, and the ranks would wait for the one in
    # it
    gc.freeze()
    stack.callback(gc.unfreeze)
    # The stack ends the bar's line before an error is shown.
    display = stack.enter_context(
        Display(first_step, progress.max_steps, world.is_main, unit_of(settings), config.objective)
    )
    return Run(
        recipe, world, loader, held_out, model, optimizer, plan, saver, stopping, metrics, display,
        progress=dataclasses.replace(progress, loader=loader.state_dict()),
        saved=first_step, saved_at=time.monotonic(),
    )  # fmt: skip


def companions_of(recipe: Recipe, loader: PackedLoader) -> Companions:
    """The files and settings that go along with weights: the tokenizer's, its chat template,
    adapters'."""
    tokenizer, companions = recipe.tokenizer, NO_COMPANIONS
    weights = folders_of(recipe.source.folder) if recipe.source else []
    if tokenizer.name != "bytes":
        file = Path(tokenizer.name)
        companions = read_companions(file, weights if file.parent in weights else [])
        companions = companions.joined(Companions(tokenizer.changed_files()))
        companions = companions.stopping_at(stop_ids(tokenizer, loader.store.are_samples))
    elif weights:
        trained_on = ""
        with contextlib.suppress(UserError):  # words, whose tokenizer is not there
            trained_on = tokenizer_of(weights[0])
        if trained_on == "bytes":
            companions = read_companions(weights[0] / "tokenizer.json", weights)
    is_extended = recipe.config.rope_scaling is not None
    companions = companions.joined(read_beside_weights(weights, is_extended)).joined(
        recipe.companions()
    )
    if weights and not recipe.checkpoint and (absent := left_out(weights, companions.files)):
        logger.info("checkpoints leave out of %s: %s", weights[0], ", ".join(absent))
    return companions


# The data


def reading_of(recipe: Recipe) -> Reading:
    """Returns how files become documents."""
    config, eos_id = recipe.config, recipe.tokenizer.eos_id
    has_adapters = config.lora is not None
    rows = row_reader(config, eos_id, config.context_length, has_adapters, recipe.only_shows)
    settings = config.chat_reasoning, config.suffixes, config.columns, config.bad_rows
    return Reading(*settings, rows, "chat_reasoning" in recipe.given)


def open_data(recipe: Recipe, world: World, reading: Reading) -> tuple[PackedLoader, Store]:
    """Returns (loader of training batches at the run's place in the data, store of held-out
    documents)."""
    config, start = recipe.config, None if recipe.checkpoint else recipe.config.init_from
    attention, only_shows = attention_in_words(recipe.model, recipe.kinds), recipe.only_shows
    vocab_size = recipe.model.vocab_size
    if only_shows:  # the tokenizer's words are shown, whatever the model has
        stored, vocab_size = dict[str, Stored](), max(vocab_size, recipe.tokenizer.vocab_size)
    else:  # refuses others' before minutes of reading
        stored = stored_of(config, recipe.tokenizer, start, attention)
    is_shown = bool(config.show_batch)
    store, held_out, packing = load_corpus(
        config.data,
        recipe.tokenizer,
        vocab_size,
        validation_fraction=config.validation_fraction,
        context_length=config.context_length,
        seed=config.seed,
        packing=config.packing,
        overlong=config.overlong,
        weights=config.data_weights,
        reading=reading,
        validation_data=config.validation_data,
        finish=partial(
            complete, config, config.context_length, vocab_size, stored, is_shown=is_shown
        ),
        may_be_one=only_shows,
    )
    if config.chat_template and not store.are_samples:
        raise UserError("chat_template has no effect without chats; drop it")
    own = {"validation_crc32": held_out.identity} if config.validation_data else {}
    loader = PackedLoader(
        store, packing, config.batch_size, world.data_rank, world.data_size, True, own
    )
    try:
        loader.check_enough_for_step(config.gradient_accumulation_steps)
    except UserError as error:
        if not is_shown:
            raise
        logger.warning("data: %s", error)
    extends = "training.export " if config.lora else ""  # adapters need an extended base
    if text := beyond(recipe.model, recipe.declared_context, packing.longest_document, extends):
        logger.warning("positions: %s", text)
    if held_out.columns and (count := int((held_out.lengths > config.context_length).sum())):
        logger.warning(
            "data: %s held-out documents, longer than a sequence, are in no validation",
            f"{count:,}",
        )
    if config.validation_sequences and (config.validation_data or not is_shown):
        check_can_validate(held_out, config.context_length, config.validation_sequences)
    check_same_on_all_ranks({**dataclasses.asdict(config), **loader.state_dict()}, world)
    if recipe.checkpoint:
        loader.load_state_dict(recipe.progress.loader)
    padded = " with padding" * (
        loader.num_tokens < loader.sequences_per_epoch * config.context_length
    )
    logger.info(
        "data: %s training tokens, %s held out; %s tokens a step%s", f"{loader.num_tokens:,}",
        f"{(held_out.lengths - 1).sum():,}", f"{tokens_per_step(config, world):,}", padded,
    )  # fmt: skip
    limit = config.validation_sequences if len(held_out.lengths) else 0
    if limit and limit < (there := count_sequences(held_out, config.context_length)):
        reads = f"{limit:,} of {there:,} held-out sequences"
        logger.info("data: a validation reads %s, --validation_sequences more", reads)
    return loader, held_out


# A step


def take_step(run: Run) -> dict | None:
    """The next step. Returns its metrics; None if the run was asked to end, and the step was
    dropped."""
    config, world, step, began = run.config, run.world, run.progress.step + 1, time.perf_counter()
    run.stopping.watch()
    batches, unread = [], None
    try:
        batches = run.loader.next_step(config.gradient_accumulation_steps)
    except Exception as error:
        unread = error  # `train_step` tells the other ranks
    rate = learning_rate_of(step, config, run.progress.cosine_steps)
    values = {"step": step, "learning_rate": rate, "epoch": run.loader.epoch, "loss": None}
    try:
        with run.stopping.looking():
            loss, norm, metrics = train_step(
                run.model, run.optimizer, batches, world, rate, config.max_grad_norm,
                run.before_update,
                run.recipe.objective,
            )  # fmt: skip
        values |= {"loss": loss, "gradient_norm": norm, **metrics}
        if is_spike(loss, run.recent_losses):
            values["is_spike"], usual = True, mean(run.recent_losses)
            logger.warning("step %d: loss %.3f is a spike above a mean of %.3f", step, loss, usual)
        run.recent_losses.append(loss)
    except Stopped:
        run.stopped = True
        return None
    except NoTarget:
        logger.warning(
            "step %d has no token to predict, as in the middle of a prompt, and is left out", step
        )
    except NotFinite as error:
        run.leave_out(step, error)
    except NotRead:
        run.save()
        with failing_together():
            if unread is not None:
                raise unread from None
    except torch.OutOfMemoryError as error:
        error.add_note(explain_out_of_memory(run.recipe, run.plan, world.device))
        raise
    seconds, step_tokens = time.perf_counter() - began, tokens_per_step(config, world)
    run.stopping.note_step(seconds)
    if step == run.recipe.progress.step + 1:
        run.world.limit_waits(60 * (config.collective_timeout or COLLECTIVE_TIMEOUT))
    tokens = run.progress.tokens + step_tokens
    run.progress = dataclasses.replace(
        run.progress, step=step, tokens=tokens, loader=run.loader.state_dict()
    )
    run.is_updating = False
    values |= {"seconds": seconds, "tokens": tokens, "tokens_per_second": step_tokens / seconds}
    shape, kinds, trains = run.recipe.model, run.recipe.kinds, run.recipe.linear.trains_matrices
    read = (
        (each.text_lengths, kinds, each.num_valid_tokens, trains, each.documents.prompts)
        for each in batches
    )
    text_tokens = sum(sum(each.text_lengths) for each in batches)
    run.amounts = own_amounts(sum(forward_flops(shape, *each) for each in read), text_tokens, world)
    return values


# After a step


def validate_if_due(run: Run, values: dict) -> None:
    """Add a validation loss to a step's metrics if a validation is due, and nobody asks the run to
    end."""
    config, step = run.config, run.progress.step
    is_due = run.progress.is_complete or (
        config.validation_interval and step % config.validation_interval == 0
    )
    if is_due and config.validation_sequences:
        try:
            add_validation(run, values)
        except Exception:
            if run.metrics is not None:
                run.metrics.write(**values)
            raise


def add_validation(run: Run, values: dict) -> None:
    """Validate, and add the loss to `values`. What a signal or an error cuts short, the checkpoint
    says is owed."""
    config, world, step, began = run.config, run.world, run.progress.step, time.monotonic()
    run.progress.unvalidated = step
    batches = validation_batches(
        run.held_out, config.context_length, config.batch_size, world.data_rank, world.data_size,
        limit=config.validation_sequences,
    )  # fmt: skip
    try:
        with run.stopping.looking():
            read = run.read_together(batches)
            loss, metrics = validate(
                run.model, read, world, run.stopping.is_asked, run.recipe.objective
            )
    except Stopped:
        run.stopped = True
        logger.warning("the validation of step %d is cut short; --resume makes up for it", step)
        return
    run.progress.unvalidated, run.progress.validation_loss = None, loss
    now = time.monotonic()
    run.validation_seconds += now - began
    share = run.validation_seconds / (now - run.began)
    values |= {
        "validation_loss": loss,
        "validation_seconds": now - began,
        "validation_share": share,
    }
    values |= {f"validation_{name}": value for name, value in metrics.items()}


def owes_validation(config: TrainConfig, progress: Progress) -> bool:
    return progress.unvalidated is not None and bool(config.validation_sequences)


def make_up_validation(run: Run) -> None:
    """Validate the step that the run goes on from. The last step's checkpoint is written anew, with
    the loss."""
    values: dict = {"step": run.progress.step}
    add_validation(run, values)
    if "validation_loss" in values:
        if run.metrics is not None:
            run.metrics.write(**values)
            run.display.show_validation(values)
        if run.progress.is_complete:
            run.saved = None
            run.save()


def save_if_due(run: Run, values: dict) -> None:
    """Write and show a step's metrics; begin a checkpoint if the run ends, or one is due by the
    main rank's clock."""
    step, seconds = run.progress.step, values["seconds"]
    is_due = is_save_due(
        run.recipe, step, time.monotonic() - run.saved_at, run.saver.error is not None
    )
    run.stopped, saves, amounts = run.stopping.agree(is_due, seconds, run.amounts)
    values |= summed_metrics(amounts, seconds, run.world)
    if run.metrics is not None:
        run.metrics.write(**values)
        run.promise_shutdown_once(seconds)
        run.display.show(values)
    if saves or run.stopped or run.progress.is_complete:
        run.save()


# The end


def end(run: Run) -> int:
    """Save the last checkpoint and log a sample; returns the process's exit status."""
    config, step = run.config, run.progress.step
    run.display.close()
    if run.stopped:
        run.save()
    elif config.sample_tokens:
        log_sample(run)
    run.stopping.watchdog.cancel()
    signals = run.stopping.num_signals()
    run.saver.finish(lambda: run.stopping.num_signals() > signals)
    if run.world.is_main and not run.stopped:
        draw_at_end(Path(config.output_dir))
    if run.stopped and (not run.progress.is_complete or owes_validation(config, run.progress)):
        number = run.stopping.first_signal()
        stopped = f"{number.name}: stopped after step {step} of {run.progress.max_steps}"
        logger.info(stopped)
        logger.info(after_a_stop(config, run.recipe.given, run.saver.last, run.world))
        return 128 + number
    return 0


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
