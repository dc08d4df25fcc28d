"""Losses of pairs and of rollouts against formulas of the papers, and what packing, accumulation
and ranks change."""

import math

import numpy as np
import pytest
import torch

from model import Transformer
from tests.ranks import run_ranks
from tests.shapes import model_of
from training.data.loader import PROMPT, make_batch
from training.data.sources import Document
from training.data.tokens import TokenStore
from training.families.decide import Source
from training.families.lora import ADAPTER_CONFIG, Adapters
from training.objectives.kto import KTO
from training.objectives.preferences import Preference
from training.objectives.rollout_rows import Rollouts, advantages
from training.objectives.rollouts import Rollout
from training.objectives.scored import collect
from training.parallel.ulysses import share_sequences
from training.parallel.world import World
from training.run.decide import adapters_found
from training.run.settings import TrainConfig, check_config
from training.run.train_step import beside_step, count_losses, run_model, validate

CPU = World(0, 1, torch.device("cpu"))
CONFIG = model_of(64, 32, 48, 1, 4, 2, 16, initializer_range=0.2)
PAIRS = [((3, 4), (3, 6)), ((2, 7), (2, 1)), ((1, 1), (1, 1))]  # prompt, answer
ROLLOUTS = [(4, 3), (4, 1), (4, 6), (7, 5), (3, 2)]  # three answers to one prompt
PREFERENCES = [
    Preference("dpo", 0.3), Preference("dpo", 0.1, label_smoothing=0.2),
    Preference("dpo", 0.1, nll_weight=0.7),
    Preference("ipo", 0.4), Preference("simpo", 2.0, margin=0.5),
    Preference("simpo", 1.5, 0.1, 0.3, 0.2),
    Preference("orpo", 0.2),
]  # fmt: skip
KTOS = [KTO(0.3), KTO(0.5, 1.5, 0.7)]
KINDS = [
    Rollout("grpo"), Rollout("grpo", beta=0.3), Rollout("dapo", 0.1, 0.1, 0.3),
    Rollout("dr_grpo", context_length=32),
    Rollout("gspo", 0.2, 0.05, 0.1), Rollout("cispo", clip_high=0.3),
    Rollout("importance_sampling", 0.05),
]  # fmt: skip


def build():
    torch.manual_seed(0)
    return Transformer(CONFIG)


def documents_of(lengths, seed, columns=()):
    """A document of texts (prompt, answer); the second answer token of a long answer is no target,
    as a tool's."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 64, sum(map(sum, lengths))).astype(np.uint32)
    if len(lengths) == 2:  # a pair has one prompt
        (count, own), _ = lengths
        tokens[count + own : 2 * count + own] = tokens[:count]
    masked = np.concatenate([np.arange(p + a) < p for p, a in lengths])
    if lengths[0][1] > 4:
        masked[lengths[0][0] + 1] = True
    numbers = np.repeat(np.arange(len(lengths)), [p + a for p, a in lengths])
    found = {"answer": numbers} | {
        name: -4.5 + 0.7 * generator.standard_normal(len(tokens)) for name in columns
    }
    if "advantage" in columns:
        found["advantage"] = np.full(len(tokens), generator.standard_normal())
    return Document(
        tokens, masked, True, columns={name: x.astype(np.float32) for name, x in found.items()}
    )


def store_of(objective):
    if isinstance(objective, Preference | KTO):
        documents = [documents_of(pair, i, ("reference",)) for i, pair in enumerate(PAIRS)]
        for i, document in enumerate(documents):
            document.columns["reference"] -= 1  # so that kto's z is above 0
            document.columns["label"] = np.full(len(document.tokens), i % 2, np.float32)
    else:
        columns = "advantage", "old", "written", "reference"
        documents = [documents_of([each], i, columns) for i, each in enumerate(ROLLOUTS)]
        for document in documents[1:3]:
            document.tokens[:4] = documents[0].tokens[:4]
    return TokenStore(documents, 0)


def sharing_prompts(store):
    """The same pairs or rollouts, each prompt once: pairs as `rows.Pairs` makes them."""
    documents = []
    if len(store.lengths) == len(ROLLOUTS):
        for document, length in enumerate(store.lengths.tolist()):
            ids, masked = store.read_masked(document, 0, length)
            columns = store.read_columns(document, 0, length)
            documents.append(Document(ids.astype(np.uint32), masked, True, columns=columns))
        return TokenStore(Rollouts(0, {}, 17).join(documents), 0)
    for document, ((count, own), _) in enumerate(PAIRS):
        ids, masked = store.read_masked(document, 0, int(store.lengths[document]))
        columns = {name: x.copy() for name, x in store.read_columns(document, 0, len(ids)).items()}
        columns["answer"][: count - 1] = PROMPT
        kept = np.delete(np.arange(len(ids)), slice(count + own, 2 * count + own - 1))
        columns = {name: x[kept] for name, x in columns.items()}
        documents.append(Document(ids[kept].astype(np.uint32), masked[kept], True, columns=columns))
    return TokenStore(documents, 0)


def answers_of(model, store):
    """For each answer its targets' log-probabilities, differentiable, and columns."""
    found = []
    for document in range(len(store.lengths)):
        stop = int(store.lengths[document])
        ids, masked = store.read_masked(document, 0, stop)
        columns = store.read_columns(document, 0, stop)
        for number in np.unique(columns["answer"]):
            own = columns["answer"] == number
            tokens, at = torch.from_numpy(ids[own])[None], torch.from_numpy(~masked[own])[1:]
            log_p = model(tokens, return_logits=True).logits[0, :-1].double().log_softmax(-1)
            log_p = log_p.gather(1, tokens[0, 1:, None])[:, 0][at]
            found.append(
                (log_p, {n: torch.from_numpy(x[own]).double()[1:][at] for n, x in columns.items()})
            )
    return found


def loss_of_pairs(objective, answers):
    """As the papers write it, pair by pair."""
    total, beta = 0.0, objective.beta
    for (chosen, at_c), (rejected, at_r) in zip(answers[::2], answers[1::2]):
        ratio_c, ratio_r = chosen - at_c["reference"], rejected - at_r["reference"]
        nll = -chosen.mean()
        if objective.name == "dpo":
            reward = beta * (ratio_c.sum() - ratio_r.sum())
            s = objective.label_smoothing
            total += -(1 - s) * torch.log(torch.sigmoid(reward)) - s * torch.log(
                1 - torch.sigmoid(reward)
            )
        elif objective.name == "ipo":
            total += (ratio_c.mean() - ratio_r.mean() - 1 / (2 * beta)) ** 2
        elif objective.name == "simpo":
            reward, s = (
                beta * (chosen.mean() - rejected.mean()) - objective.margin,
                objective.label_smoothing,
            )
            total += -(1 - s) * torch.log(torch.sigmoid(reward)) - s * torch.log(
                torch.sigmoid(-reward)
            )
        else:
            odds = [p / (1 - p) for p in (chosen.mean().exp(), rejected.mean().exp())]
            total += nll - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
        total += objective.nll_weight * nll
    return total / len(PAIRS)


def loss_of_labels(objective, answers):
    """As the paper writes it, answer by answer. The second of each pair is of another prompt."""
    ratios = [(log_p - at["reference"]).sum() for log_p, at in answers]
    z, total = torch.stack(ratios[1::2]).mean().clamp(min=0).detach(), 0.0
    assert z > 0.1
    for ratio, (_, at) in zip(ratios[::2], answers[::2]):
        if at["label"][0]:
            total += objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (ratio - z)))
        else:
            total += objective.undesirable_weight * (
                1 - torch.sigmoid(objective.beta * (z - ratio))
            )
    return total / len(PAIRS)


def loss_of_rollouts(objective, answers):
    """As the papers write it, token by token."""
    by_answer, low, high = [], 1 - objective.clip_low, 1 + objective.clip_high
    for log_p, at in answers:
        advantage, ratio = at["advantage"], (log_p - at["old"]).exp()
        trust = (at["old"] - at["written"]).exp().clamp(max=objective.truncation)
        ahead = at["reference"] - log_p
        penalty = objective.beta * (ahead.exp() - ahead - 1)
        if objective.name == "gspo":
            ratio = (log_p - at["old"]).mean().exp()
            advantage, trust = (trust * advantage).mean(), 1.0
        clipped = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if objective.name == "importance_sampling":
            clipped = ratio * advantage
        elif objective.name == "cispo":
            clipped = torch.minimum(ratio, torch.tensor(high)).detach() * advantage * log_p
        by_answer.append(-clipped * trust + penalty)
    if objective.name in ("grpo", "gspo"):
        return torch.stack([each.mean() for each in by_answer]).mean()
    total = torch.cat(by_answer)
    return total.sum() / (len(answers) * 32) if objective.name == "dr_grpo" else total.mean()


def divided(store, how):
    """Micro-batches of all documents: one row of all, a row each in one batch, a batch each in
    reverse order."""
    spans = [(i, 0, int(n)) for i, n in enumerate(store.lengths)]
    if how == "packed":
        return [make_batch(store, [spans], 80)]
    if how == "rows":
        return [make_batch(store, [spans[:2], spans[2:], []], 48)]
    return [make_batch(store, [[span]], 17) for span in reversed(spans)]


def run(model, batches, objective, world=CPU):
    model.zero_grad()
    count, losses, terms = count_losses(batches, world, objective), [], []
    batches = [batch.slice(world.context_rank, world.context_size) for batch in batches]
    objective = beside_step(model, batches, world, objective)
    for batch in batches:
        loss = run_model(model, batch, world, count, objective, terms)
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return world.sum(math.fsum(losses))[0], gradients, collect(terms, world)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    scale = max(float(g.abs().max()) for g in expected[1].values())
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).abs().max()) < 1e-5 * max(scale, 1), name


def exact_of(model, objective, store):
    formula = {Preference: loss_of_pairs, KTO: loss_of_labels, Rollout: loss_of_rollouts}[
        type(objective)
    ]
    loss = formula(objective, answers_of(model, store))
    return float(loss.detach()), dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]))
    )


@pytest.mark.parametrize(
    "objective", [*PREFERENCES, *KTOS, *KINDS], ids=lambda o: getattr(o, "name", "kto")
)
def test_loss_and_every_gradient_are_the_papers_however_answers_are_divided(objective):
    model, store = build(), store_of(objective)
    expected, metrics = exact_of(model, objective, store), []
    ways = [(store, "packed", "standard"), (store, "rows", "chunked"), (store, "each", "chunked")]
    shared = sharing_prompts(store)
    for each, how, model.loss_impl in (
        *ways,
        (shared, "rows", "chunked"),
        (shared, "each", "standard"),
    ):
        found = run(model, divided(each, how), objective)
        assert_same(found, expected)
        metrics.append(found[2])
    with torch.no_grad():  # what is held out has the same loss
        held_out = validate(model, iter(divided(shared, "each")), CPU, lambda: False, objective)
    assert held_out[0] == pytest.approx(expected[0], rel=2e-2)
    for name, value in metrics[0].items():
        assert [found[name] for found in metrics[1:]] == pytest.approx([value] * 4, abs=1e-5), name


@pytest.mark.parametrize("objective", KINDS, ids=lambda o: o.name)
def test_tokens_that_the_old_policy_could_not_have_written_leave_numbers(objective):
    """Engines may write -1000 for minus infinity; e^1000 is no number, nor is 0 times it, in loss
    or gradient."""
    model, store = build(), store_of(objective)
    old = store.column("old").copy()
    old[::3] = -1000
    store.add_column("old", old)
    loss, gradients, metrics = run(model, divided(store, "rows"), objective)
    assert math.isfinite(loss) and all(gradient.isfinite().all() for gradient in gradients.values())
    assert metrics["old_difference_max"] > 900


def test_tokens_far_from_the_reference_leave_numbers():
    """e^1000 is no number, and a token that is certain has infinite odds."""
    objective = Rollout("grpo", 0.1, 0.1, 0.2)
    model, store = build(), store_of(objective)
    reference = store.column("reference").copy()
    reference[::3] = 1000
    store.add_column("reference", reference)
    loss, gradients, _ = run(model, divided(store, "rows"), objective)
    assert math.isfinite(loss) and all(gradient.isfinite().all() for gradient in gradients.values())

    for certain in ([0.0, -1.0], [-1.0, 0.0], [0.0, 0.0]):
        chosen, rejected = torch.tensor(certain, dtype=torch.float64).requires_grad_()
        loss = Preference("orpo", 0.2)._losses(chosen, rejected)
        assert loss.isfinite() and all(
            x.isfinite() for x in torch.autograd.grad(loss, [chosen, rejected])
        )


def test_metrics_say_what_they_mean():
    model = build()
    objective = Preference("dpo", 0.3)
    answers = answers_of(model, store_of(objective))
    rewards = [0.3 * float((log_p - at["reference"]).sum().detach()) for log_p, at in answers]
    found = run(model, divided(store_of(objective), "rows"), objective)[2]
    chosen, rejected = np.array(rewards[::2]), np.array(rewards[1::2])
    wanted = {"accuracy": (chosen > rejected).mean(), "margin": (chosen - rejected).mean()}
    wanted |= {"reward_chosen": chosen.mean(), "reward_rejected": rejected.mean()}
    assert found == pytest.approx(wanted, rel=1e-4)

    objective = Rollout("dapo", 0.1, 0.1, 0.3)
    answers = answers_of(model, store_of(objective))
    log_p = torch.cat([log_p for log_p, _ in answers]).detach()
    old, reference, advantage = (
        torch.cat([at[n] for _, at in answers]) for n in ("old", "reference", "advantage")
    )
    found = run(model, divided(store_of(objective), "rows"), objective)[2]
    ratio, ahead = (log_p - old).exp(), reference - log_p
    is_clipped = ((ratio > 1.3) & (advantage > 0)) | ((ratio < 0.9) & (advantage < 0))
    wanted = {
        "clip_share": is_clipped.double().mean(), "kl": (ahead.exp() - ahead - 1).mean(),
        "old_difference": (log_p - old).abs().mean(),
        "old_difference_max": (log_p - old).abs().max(),
    }  # fmt: skip
    assert 0 < wanted["clip_share"] < 1 and 0 < found.pop("entropy") < math.log(64)
    assert found == pytest.approx({name: float(x) for name, x in wanted.items()}, rel=1e-4)


def test_the_first_loss_of_dpo_is_ln_2_beside_adapters_whose_base_is_the_reference():
    """The base is found by leaving the adapters out; once they are trained, the loss is of the
    difference."""
    model, objective = build(), Preference("dpo", 0.1)
    documents = [documents_of(pair, i) for i, pair in enumerate(PAIRS)]
    batches = divided(TokenStore(documents, 0), "rows")
    base = answers_of(model, TokenStore(documents, 0))
    Adapters(2, 4.0).prepare(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            model.initialize_parameter(name, parameter.data)
    loss, gradients, _ = run(model, batches, objective)
    assert loss == pytest.approx(math.log(2), abs=1e-6) and all(
        g.isfinite().all() for g in gradients.values()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter += torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    now = answers_of(model, TokenStore(documents, 0))
    expected = loss_of_pairs(
        objective, [(p, {"reference": q.detach()}) for (p, _), (q, _) in zip(now, base)]
    )
    assert float(expected.detach()) != pytest.approx(math.log(2), abs=1e-3)
    assert run(model, batches, objective)[0] == pytest.approx(float(expected.detach()), abs=1e-6)


def test_a_stored_reference_stands_in_place_of_the_base_of_adapters(tmp_path, caplog):
    """Adapters that a run starts from are no part of the base, which it says."""
    objective = PREFERENCES[0]
    store = store_of(objective)
    expected = run(build(), divided(store, "rows"), objective)[0]
    model = build()
    Adapters(2, 4.0).prepare(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            model.initialize_parameter(name, parameter.data)
    assert (
        run(model, divided(store, "rows"), objective)[0]
        == expected
        != pytest.approx(math.log(2), abs=1e-3)
    )

    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    for flags in ({}, {"reference_logprobs": "any"}):
        given = {
            "objective": "dpo",
            "data": ["a.jsonl"],
            "lora": 2,
            "init_from": str(tmp_path),
        } | flags
        check_config(TrainConfig(**given), given, TrainConfig.rules)
        adapters_found(
            TrainConfig(**given), given, Source(tmp_path, tmp_path / "base", Adapters(2, 4.0))
        )
    assert caplog.text.count("the reference is the base") == 1


def test_weights_of_rows_multiply_their_loss():
    model, lengths = build(), [(4, 3), (2, 9)]
    documents = [documents_of([each], i) for i, each in enumerate(lengths)]
    for document, weight in zip(documents, (-0.5, 1.75)):
        document.columns["weight"] = np.full(len(document.tokens), weight, np.float32)
    store = TokenStore(documents, 0)
    parts = [log_p * at["weight"] for log_p, at in answers_of(model, store)]
    exact = -torch.cat(parts).sum() / sum(map(len, parts))
    wanted = (
        float(exact),
        dict(
            zip(dict(model.named_parameters()), torch.autograd.grad(exact, [*model.parameters()]))
        ),
    )
    for how in ("packed", "each"):
        assert_same(run(model, divided(store, how), None), wanted)


def check_ranks(world):
    """Ranks share the sequences, of an odd number of tokens too, or have sequences of their own.
    Some pairs and rollouts share their prompts."""
    for objective in (
        PREFERENCES[2],
        PREFERENCES[0],
        PREFERENCES[6],
        KTOS[1],
        KINDS[1],
        KINDS[3],
        KINDS[4],
    ):
        model, store = build(), store_of(objective)
        expected, metrics = (
            exact_of(model, objective, store),
            run(model, divided(store, "rows"), objective)[2],
        )
        if objective in (*PREFERENCES[:3], *KTOS, *KINDS[3:]):
            store = sharing_prompts(store)
            assert any(batch.documents.prompts for batch in divided(store, "rows"))
        if world.context_size > 1:
            share_sequences(model, world)
        for how in ("rows", "each")[world.context_size == 1 :]:
            batches = divided(store, how)
            own = batches[world.data_rank :: world.data_size]
            loss, gradients, found = run(model, own, objective, world)
            for gradient in gradients.values():
                torch.distributed.all_reduce(gradient)
            assert_same((loss, gradients), expected)
            assert found == pytest.approx(metrics, abs=1e-5)
            held_out, found = validate(model, own, world, lambda: False, objective)
            assert held_out == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
            assert found == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("shared", [1, 2])
def test_two_ranks(shared):
    run_ranks(2, check_ranks, context_parallel_size=shared)


@pytest.mark.parametrize("scaled", [True, False])
def test_advantages_are_rewards_beside_their_groups(scaled):
    rewards, groups = np.float32([1, 3, 5, 7, 2]), np.float32([0, 1, 0, 1, 2])
    found = advantages(rewards, groups, scaled)
    wanted = np.array([-2, -2, 2, 2, 0]) / ((np.sqrt([8, 8, 8, 8, 1]) + 1e-4) if scaled else 1)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
