import math
import re
import time
from dataclasses import replace

import pytest

from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.lora import LORA
from model import MODEL_SIZES
from tests.training.memory.test_cost_model import step_of
from training.families.lora import Adapters
from training.memory.cost_model import fullest_stage, step_seconds
from training.memory.execution import WHOLE, Execution
from training.memory.machine import H200
from training.memory.planner import (
    HEADROOM,
    LEAST_HEADROOM,
    _largest,
    _Search,
    find_max_context,
    has_plan,
    make_plan,
)
from training.memory.step import PackedDocuments, Step
from training.optim.formats import frozen_format
from training.run.build import step_on_meta

GIB = 2**30
HOST = 110 * GIB


@pytest.mark.parametrize(
    ("context", "gib"),
    [(65_536, 16), (131_072, 24), (262_144, 40), (393_216, 64), (524_288, 80), (1_048_576, 139)],
)
def test_contexts_that_must_fit(context, gib):
    step = step_of(MODEL_SIZES["4B"], context)
    plan = make_plan(step, gib * GIB, HOST)
    assert plan.peak.bytes * LEAST_HEADROOM <= gib * GIB and plan.host_bytes <= HOST
    assert plan.peak == fullest_stage(step, plan.execution) and plan.arena_bytes <= plan.host_bytes
    assert len(plan.execution.placements) == 36
    rows = str(plan).splitlines()
    assert f"predicted GPU peak     {plan.peak.bytes / GIB:.2f} GiB, in {plan.peak.name}" in rows


def test_a_whole_gpu_keeps_attention_there_and_a_small_one_on_the_host():
    step = step_of(MODEL_SIZES["4B"], 131_072)
    whole, small = (make_plan(step, gib * GIB, HOST) for gib in (139, 24))
    assert {p.results for p in whole.execution.placements} == {"gpu"} and whole.arena_bytes == 0
    assert {p.results for p in small.execution.placements} <= {"gpu", "host"}
    assert whole.seconds < small.seconds < 1.1 * whole.seconds


def test_blocks_stay_whole_where_memory_is_plenty():
    """All of them where they fit: then nothing runs twice. Else the last ones, and the more the
    larger the budget."""
    step = step_of(MODEL_SIZES["4B"], 8192)
    plan = make_plan(step, 139 * GIB, HOST)
    assert set(plan.execution.placements) == {WHOLE}
    assert "blocks kept whole      36" in str(plan).splitlines()
    flops = 6 * step.tokens * (36 * step.shard.layer_matrix_parameters() + 151_936 * 2560)
    attention = 36 * 4 * 4096 * (8192 * 8193 // 2)
    compute = flops / H200["products"]
    compute += attention * (1 / H200["full forward"] + 2.5 / H200["full backward"])
    assert step_seconds(step, plan.execution, H200 | {"memory": math.inf}) == pytest.approx(compute)
    assert plan.seconds < 1.2 * compute

    plans = [make_plan(step, gib * GIB, HOST) for gib in (64, 72, 80)]
    whole = [[p.is_whole for p in plan.execution.placements] for plan in plans]
    assert all(places == sorted(places) for places in whole)
    assert 0 < sum(whole[0]) < sum(whole[1]) < sum(whole[2]) < 36
    assert plans[0].seconds > plans[1].seconds > plans[2].seconds > plan.seconds


def test_adapters_of_the_4b_fit_16_gib_with_little_host_memory():
    """At 131,072 tokens, where full training needs more of both. With a third of the layers, more
    memory saves time."""
    given, few = Execution(state_format="float32"), replace(MODEL_SIZES["4B"], num_hidden_layers=12)
    (whole_full, whole_lora), (full, lora) = (
        (
            step_on_meta(shape, 131_072, given=given),
            step_on_meta(
                shape, 131_072, given=replace(given, linear=LORA), trained=Adapters(16, 32.0)
            ),
        )
        for shape in (MODEL_SIZES["4B"], few)
    )
    assert has_plan(whole_lora, 16 * GIB, 28 * GIB) and not has_plan(whole_full, 16 * GIB, 28 * GIB)
    plans = [make_plan(lora, gpu * GIB, host * GIB) for gpu, host in ((8, 12), (10, 12), (60, 40))]
    assert all(
        plan.peak.bytes <= plan.gpu_budget and plan.host_bytes <= plan.host_budget for plan in plans
    )
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < make_plan(full, 60 * GIB, 40 * GIB).seconds
    assert "adapters               rank 16, in q_proj, k_proj" in str(plans[0])


def test_fewer_bits_of_frozen_weights_fit_less_memory_and_save_time():
    """Checks a third of the 8B at 65,536 tokens, whose weights in bf16 need more memory, and then
    more time."""
    few = replace(MODEL_SIZES["8B"], num_hidden_layers=12)
    givens = {bits: Execution(linear=LORA, frozen=frozen_format(bits)) for bits in (16, 8, 4)}
    steps = {
        bits: step_on_meta(few, 65_536, given=given, trained=Adapters(16, 32.0))
        for bits, given in givens.items()
    }
    assert [has_plan(step, 9 * GIB, 5 * GIB) for step in steps.values()] == [False, True, True]
    plans = {bits: make_plan(step, 9 * GIB, 9 * GIB) for bits, step in steps.items()}
    assert plans[16].seconds > plans[8].seconds > plans[4].seconds
    assert "frozen matrices        4 bits; costs some loss" in str(
        plans[4]
    ) and "frozen" not in str(plans[16])
    roomy = make_plan(steps[4], 139 * GIB, HOST)
    assert not any(placement.is_whole for placement in roomy.execution.placements)
    kept = sum(
        matrix.numel()
        for _, matrix in steps[16].named_parameters
        if matrix.ndim == 2 and not matrix.requires_grad
    )
    kept -= 2 * steps[16].head // 2  # embedding and head stay in bf16
    assert steps[16].parameter_bytes - steps[4].parameter_bytes == kept * 2 - kept // 2 - kept // 16


@pytest.mark.parametrize("size", ["4B", "8B"])
def test_weights_beside_adapters_may_wait_on_the_host(size):
    """Checks weights of all blocks, and of embedding and head, where a GPU has no room for the
    weights."""
    lora = step_on_meta(
        MODEL_SIZES[size], 16_384, given=Execution(linear=LORA), trained=Adapters(16, 32.0)
    )
    plan = make_plan(lora, 0.6 * lora.parameter_bytes, HOST)
    assert {p.weights for p in plan.execution.placements} >= {"host"}
    assert 0.4 * lora.parameter_bytes < plan.host_bytes < HOST


def test_compact_state_makes_131k_fit_where_float32_does_not():
    compact = Execution(state_format="compact")
    float32, compact = (
        step_on_meta(MODEL_SIZES["4B"], 131_072, given=given) for given in (Execution(), compact)
    )
    budgets = 24 * GIB, 50 * GIB
    assert has_plan(compact, *budgets) and not has_plan(float32, *budgets)
    plan = make_plan(compact, *budgets)
    assert plan.execution.state_format == "compact" and ", compact\n" in str(plan)
    assert make_plan(float32, 24 * GIB, 101 * GIB).seconds > 0


@pytest.mark.parametrize(
    ("gpu", "host", "state"),
    [
        (139, 110, "GPU, float32 (auto: costs less than 1% of a step)"),
        (24, 50, "on the host, compact (auto: too little room for float32)"),  # of pinned memory
        (24, 60, "on the host, compact (auto: saves "),
    ],
)
def test_auto_takes_compact_state_where_float32_does_not_fit_or_costs_time(gpu, host, state):
    auto, float32, compact = (
        step_of(MODEL_SIZES["4B"], 131_072, state_format=name)
        for name in ("auto", "float32", "compact")
    )
    budgets = gpu * GIB, host * GIB
    plan, state_format = make_plan(auto, *budgets), "compact" if "compact" in state else "float32"
    assert plan.execution.state_format == state_format
    chosen = make_plan({"float32": float32, "compact": compact}[state_format], *budgets)
    assert plan.execution == chosen.execution and plan.seconds == chosen.seconds
    assert state in str(plan) and "auto: " not in str(chosen)
    assert has_plan(auto, *budgets) and has_plan(float32, *budgets) == ("too little" not in state)
    if has_plan(float32, *budgets):
        other = make_plan({"float32": compact, "compact": float32}[state_format], *budgets)
        slow, quick = (other, chosen) if state_format == "compact" else (chosen, other)
        saved = slow.seconds - quick.seconds
        assert (saved >= 0.01 * slow.seconds) == (state_format == "compact")
        assert "saves" not in state or f"saves {saved:.1f} s of a step)" in str(plan)


def test_auto_has_a_plan_where_float32_has_one():
    """Compact state takes less of both budgets: the longest context of auto is that of compact."""
    for size, budgets in (("0.6B", (6, 16)), ("4B", (24, 50)), ("4B", (90, 4))):
        steps = [
            step_of(MODEL_SIZES[size], 1024, state_format=name)
            for name in ("auto", "compact", "float32")
        ]
        auto, compact, float32 = (
            find_max_context(step, *(each * GIB for each in budgets)) for step in steps
        )
        assert auto == compact >= float32


def test_a_refusal_of_float32_state_proposes_compact():
    step, budgets = step_on_meta(MODEL_SIZES["4B"], 131_072), (24 * GIB, 50 * GIB)
    largest = find_max_context(step, *budgets)
    wide = step_on_meta(MODEL_SIZES["4B"], 16_384, batch_size=8)
    auto = step.with_format("auto")
    for refused, gpu, host, end in (
        (
            step,
            24,
            50,
            r"host memory; give optimizer_state compact; the largest that does in float32 is "
            rf"{largest}",
        ),
        (
            wide,
            24,
            50,
            r"; give optimizer_state compact; or lower batch_size to \d, or context_length to \d+",
        ),
        (
            step.at(1024),
            12,
            30,
            r"its optimizer's state 44\.95 GiB of either; give optimizer_state compact",
        ),
        (auto, 20, 20, r"host memory; the largest that does is \d+"),
        (auto, 8, 10, r"its optimizer's state 15\.45 GiB of either"),
    ):
        with pytest.raises(ValueError, match=f"{end}$"):
            make_plan(refused, gpu * GIB, host * GIB)


def places_of_weights(plan):
    return [placement.weights for placement in plan.execution.placements]


def test_weights_wait_on_the_host_where_they_must():
    """The 14B's weights do not fit into 24 GiB. Some of them do beside a short context, and need
    not be fetched."""
    step = step_on_meta(MODEL_SIZES["14B"], 4096, given=Execution(state_format="compact"))
    longest = find_max_context(step, 24 * GIB, 118 * GIB)
    for context_length, most in ((4096, 39), (longest, 40)):
        plan = make_plan(step.at(context_length), 24 * GIB, 118 * GIB)
        num = places_of_weights(plan).count("host")
        assert 20 <= num <= most
        assert places_of_weights(plan) == ["host"] * num + ["gpu"] * (40 - num)
        assert re.search(rf"\nweights +{num} host" + r"(, \d+ gpu)?\n", str(plan))
        assert re.search(
            r"\noptimizer state +(up to .* GiB on the GPU, the rest on the )?host, compact\n",
            str(plan),
        )
        assert plan.peak.bytes * LEAST_HEADROOM <= 24 * GIB and plan.host_bytes <= 118 * GIB
    refusal = f"; the largest that does is {longest}$"
    with pytest.raises(ValueError, match=refusal):
        make_plan(step.at(longest + 1024), 24 * GIB, 118 * GIB)
    refusal = "its parameters take 27.51 GiB of either, its optimizer's"
    with pytest.raises(ValueError, match=refusal):
        make_plan(step, 3 * GIB, 118 * GIB)


def test_embedding_and_head_wait_on_the_host_where_nothing_else_fits(monkeypatch):
    """They go with all weights and state, for longer contexts, and change no plan that there is
    without them."""
    step, budgets = step_of(MODEL_SIZES["4B"], 1024, state_format="auto"), (8 * GIB, 60 * GIB)
    longest, layouts = find_max_context(step, *budgets), _Search.layouts
    plan = make_plan(step.at(longest), *budgets)
    assert (
        set(places_of_weights(plan)) == {plan.execution.ends} == {"host"}
        and plan.execution.loss_impl == "chunked"
    )
    assert re.search(r"\nweights +36 host, embedding and head too\n", str(plan))
    assert plan.peak.bytes * LEAST_HEADROOM <= budgets[0] and plan.host_bytes <= budgets[1]
    for loss_impl in ("chunked", "standard"):
        asked = step_of(MODEL_SIZES["4B"], longest, loss_impl=loss_impl, state_format="auto")
        assert has_plan(asked, *budgets) == (loss_impl == "chunked")
    shorter = step.at(longest * 7 // 8)
    execution = make_plan(shorter, *budgets).execution
    monkeypatch.setattr(
        _Search, "layouts", lambda search: layouts(search) if 37 not in search.waiting else iter(())
    )
    assert make_plan(shorter, *budgets).execution == execution and execution.ends == "gpu"
    assert not has_plan(step.at(longest), *budgets)


def test_as_many_weights_visit_as_both_budgets_need():
    """Where weights stay on the GPU, so can their state: with a short host more than half of the
    blocks visit."""
    step = step_on_meta(MODEL_SIZES["14B"], 1024, given=Execution(state_format="compact"))
    longest = find_max_context(step, 24 * GIB, 99 * GIB)
    places = places_of_weights(make_plan(step.at(longest), 24 * GIB, 99 * GIB))
    assert (
        longest > 16_384
        and 20 < places.count("host") < 40
        and places == sorted(places, reverse=True)
    )


def test_weights_stay_on_the_gpu_where_they_cost_nothing(monkeypatch):
    """The same plans as without weights that visit, and a row about weights in none."""
    step = step_of(MODEL_SIZES["4B"], 32_768, state_format="auto")
    budgets = [(139, 110), (24, 50)]
    plans = [make_plan(step, gpu * GIB, host * GIB) for gpu, host in budgets]
    monkeypatch.setattr(Step, "can_visit", False)
    for plan, (gpu, host) in zip(plans, budgets):
        assert plan.execution == make_plan(step, gpu * GIB, host * GIB).execution
        assert set(places_of_weights(plan)) == {"gpu"} and "weights" not in str(plan)


def test_weights_stay_where_the_host_is_shorter_and_on_several_gpus():
    """Weights on the host take 2 bytes per parameter there."""
    step = step_of(MODEL_SIZES["4B"], 16_384, state_format="compact")
    assert set(places_of_weights(make_plan(step, 40 * GIB, 4 * GIB))) == {"gpu"}
    for options in ({"num_gpus": 2}, {"num_gpus": 2, "tensor_parallel_size": 2}):
        step = step_on_meta(MODEL_SIZES["0.6B"], 65_536, **options)
        assert not step.can_visit
        assert set(places_of_weights(make_plan(step, 6 * GIB, 16 * GIB))) == {"gpu"}
    assert step_on_meta(MODEL_SIZES["0.6B"], 65_536).can_visit


def test_weights_that_visit_lengthen_the_context_and_never_the_step(monkeypatch):
    step = step_of(MODEL_SIZES["4B"], 16_384, state_format="compact")
    budgets = [(gpu * GIB, 60 * GIB) for gpu in (10, 14, 24)]
    longest = [find_max_context(step, *budget) for budget in budgets]
    seconds = [make_plan(step, *budget).seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True) and longest == sorted(longest)
    monkeypatch.setattr(Step, "can_visit", False)
    for budget, visited, took in zip(budgets, longest, seconds):
        assert find_max_context(step, *budget) < visited
        assert not has_plan(step, *budget) or make_plan(step, *budget).seconds >= took


def test_a_guess_shortens_a_search_and_changes_no_answer():
    for limit in (0, 1, 2, 9, 40):
        for answer in range(limit + 1):
            for guess in (None, *range(limit + 3)):
                tried = []

                def holds(n, answer=answer, tried=tried):
                    tried.append(n)
                    return n <= answer

                assert _largest(limit, holds, guess) == answer
                assert len({*tried}) == len(tried) and {*tried} <= {*range(1, limit + 1)}
                assert guess != answer or len(tried) <= 2


def test_a_plan_is_made_in_seconds():
    began = time.process_time()
    make_plan(step_of(MODEL_SIZES["4B"], 16_384), 80 * GIB, HOST)
    assert time.process_time() - began < 3


def test_more_memory_is_never_slower():
    step = step_of(MODEL_SIZES["0.6B"], 32_768, micro_batches=2)
    seconds = [make_plan(step, gib * GIB, 10 * GIB).seconds for gib in (5, 8, 24)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    seconds = [make_plan(step, 5 * GIB, gib * GIB).seconds for gib in (10, 13)]
    assert seconds == sorted(seconds, reverse=True)


def test_state_on_the_host_leaves_no_quarter_of_it_free_on_the_gpu():
    """A short step waits for its update: with more host memory, it kept less state on the GPU and
    took 8% longer."""
    step = step_of(MODEL_SIZES["4B"], 128, state_format="compact")
    plans = [make_plan(step, 19.6 * GIB, gib * GIB) for gib in (15.7, 196)]
    assert plans[1].seconds < plans[0].seconds and "host" not in places_of_weights(plans[1])
    assert plans[1].peak.bytes > 0.97 * 19.6 * GIB / HEADROOM


def test_the_largest_context_fits_and_the_next_does_not():
    """Headroom is left where it can be, and the least of it at the largest context."""
    step, budgets = step_of(MODEL_SIZES["0.6B"], 1024, state_format="auto"), (6 * GIB, 16 * GIB)
    largest = find_max_context(step, *budgets)
    assert largest > 32_768 and largest % 1024 == 0
    assert 6 * GIB / make_plan(step.at(largest // 2), *budgets).peak.bytes > HEADROOM
    assert LEAST_HEADROOM < 6 * GIB / make_plan(step.at(largest), *budgets).peak.bytes < HEADROOM
    refusal = rf"context_length {largest + 1024} does .*; the largest that does is {largest}$"
    with pytest.raises(ValueError, match=refusal):
        make_plan(step.at(largest + 1024), *budgets)
    with pytest.raises(
        ValueError, match="at 1024 tokens of context and batch_size 1: its parameters take"
    ):
        make_plan(step, 1 * GIB, HOST)


def test_a_batch_that_does_not_fit_names_the_one_that_does():
    """Then the context that fits with the batch as it is. Without a batch that fits: the context
    with batch_size 1."""
    step = step_on_meta(MODEL_SIZES["4B"], 131_072, batch_size=8)
    for gpu, host in ((24, 110), (40, 200)):
        budgets = gpu * GIB, host * GIB
        with pytest.raises(ValueError) as error:
            make_plan(step, *budgets)
        refusal = (
            f"context_length 131072 with batch_size 8 does not fit into {gpu}.00 GiB of GPU and "
            f"{host}.00 GiB of host"
        )
        batch_size, context = re.fullmatch(
            rf"{refusal} memory; lower batch_size to (\d), or context_length to (\d+)",
            str(error.value),
        ).groups()
        make_plan(step.with_batch(int(batch_size)), *budgets)
        make_plan(step.at(int(context)), *budgets)
        with pytest.raises(ValueError, match="fit into"):
            make_plan(step.with_batch(int(batch_size) + 1), *budgets)
    alone = find_max_context(step.with_batch(1), 6 * GIB, HOST)
    with pytest.raises(ValueError, match=rf"; the largest that does is {alone} with batch_size 1$"):
        make_plan(step, 6 * GIB, HOST)


def test_a_batch_of_packed_documents_keeps_their_lengths():
    documents = PackedDocuments(4096, ((100, 40.0), (4096, 2.0)))
    step = step_of(MODEL_SIZES["0.6B"], 8192, batch_size=8, documents=documents)
    fewer = step.with_batch(2)
    assert (
        fewer.documents == PackedDocuments(4096, ((100, 10.0), (4096, 0.5)))
        and 4 * fewer.tokens == step.tokens
    )
    assert step.batch_size == 8 and step.documents == documents


@pytest.mark.parametrize("kind", [Sparse(), NSA()])
def test_chosen_blocks_have_numbers_of_16_bits(kind):
    """Past 32,767 blocks of 64 tokens no plan is made, whatever memory there is."""
    config = replace(MODEL_SIZES["0.6B"], num_hidden_layers=2).with_kinds(kind)
    step = step_on_meta(config, 2_097_088)
    assert find_max_context(step, 1000 * GIB, HOST) == 2_097_088 // 1024 * 1024
    make_plan(step, 1000 * GIB, HOST)
    with pytest.raises(
        ValueError, match="up to 2,097,088 tokens, and context_length 2,097,089 has longer"
    ):
        make_plan(step.at(2_097_089), 1000 * GIB, HOST)


def test_a_small_budget_chunks_a_loss_that_would_be_whole_unless_one_was_asked_for():
    for loss_impl in ("chunked", "standard"):
        short = step_of(MODEL_SIZES["0.6B"], 4096, loss_impl=loss_impl)
        assert make_plan(short, 40 * GIB, HOST).execution.loss_impl == loss_impl
    step = step_of(MODEL_SIZES["0.6B"], 32_768)
    assert make_plan(step, 80 * GIB, HOST).execution.loss_impl == "auto"
    assert make_plan(step, 8 * GIB, HOST).execution.loss_impl == "chunked"
    with pytest.raises(ValueError, match="context_length 32768"):
        make_plan(step_of(MODEL_SIZES["0.6B"], 32_768, loss_impl="standard"), 8 * GIB, HOST)


def test_attention_to_chosen_blocks_is_faster_where_documents_are_long():
    """A million tokens of the 4B; below `dense_below` the same as attention to everything."""
    for context, most in ((2**20, 0.15), (4096, 1.0)):
        sparse, dense = (
            make_plan(
                step_on_meta(MODEL_SIZES["4B"], context, given=Execution(kinds=kinds)),
                138 * GIB,
                HOST,
            )
            for kinds in ((Sparse(64),) * 2 + (Sparse(),) * 34, ())
        )
        assert sparse.seconds <= most * dense.seconds and "64x2,32 chosen blocks of 64" in str(
            sparse
        )
    assert sparse.seconds == dense.seconds and sparse.peak.bytes == dense.peak.bytes
