"""Whole runs of a model of a few thousand parameters: fair to every algorithm, and the replicas against plain torch."""

import numpy as np
import pytest
import torch

from noloco_node.data.corpus import Corpus
from noloco_node.data.stream import spread
from noloco_node.errors import UsageError
from noloco_node.run.schema import DataSpec, InnerSpec, ModelSpec
from noloco_node.simulate.experiment import Workload, run
from noloco_node.simulate.readers import Readers, own_modules
from noloco_node.simulate.replicas import ReplicaBatch
from noloco_node.simulate.settings import Settings, choice
from noloco_node.training.inner.schedule import learning_rate
from noloco_node.training.model import build, next_token_loss

MODEL = ModelSpec(
    architecture="LlamaConfig",
    config={
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
)
SMALL = {"model": MODEL, "data": DataSpec(sequence_length=16), "precision": "fp32", "codec": "fp32", "replicas": 4}
SMALL |= {"defences": False}  # 128 held-out tokens are too few to judge a swap by
INNER = InnerSpec(steps=4, batch_tokens=32, learning_rate=0.01)


def corpus(modules=40, size=400):
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 110, size, dtype=np.uint8)) for _ in range(modules)]
    text = np.frombuffer(b"\0".join(texts), np.uint8)
    return Corpus(text, text[:2000])


def workload(**changed):
    settings = Settings(**{**SMALL, "inner": INNER, "rounds": 3, "held_out_sequences": 8, **changed})
    text = corpus()
    return Workload(
        settings=settings,
        module=build(settings.model, 256, settings.seed),
        corpus=text,
        held_out=spread(text.held_out, 16, 8),
    )


def curve(work, text):
    return run(work, choice(text), lambda step, loss: None)


def test_every_algorithm_starts_alike_and_sees_as_many_tokens():
    work = workload()
    names = ("noloco", "noloco-paper", "diloco", "streaming", "sparta", "gasloc", "fedavg", "ddp", "local")
    curves = {name: curve(work, name) for name in names}
    assert len({c.averaged_model_loss[0] for c in curves.values()}) == 1
    assert {c.tokens[-1] for c in curves.values()} == {3 * 4 * 4 * 32}
    assert all(c.averaged_model_loss[-1] < c.averaged_model_loss[0] - 0.3 for c in curves.values())
    assert all(len(c.steps) == len(c.replica_std) == len(c.bytes_sent_per_param) == 4 for c in curves.values())
    assert curves["ddp"].replica_std[-1] == pytest.approx(0, abs=1e-7)
    assert curves["diloco"].replica_std[-1] == 0
    assert curves["local"].replica_std[-1] > curves["noloco"].replica_std[-1] > 0
    assert curves["local"].bytes_per_param == 0
    assert curves["noloco"].bytes_per_param == 3 * 4
    assert curves["ddp"].bytes_per_param == 3 * 4 * (2 * 3 / 4) * 4


def test_the_same_seed_gives_the_same_curve_and_another_seed_another():
    first, again, other = (curve(workload(seed=seed), "noloco") for seed in (1, 1, 2))
    assert first.averaged_model_loss == again.averaged_model_loss
    assert first.averaged_model_loss != other.averaged_model_loss


def test_an_algorithm_may_meet_more_often_for_the_same_steps():
    often = curve(workload(), "noloco:inner_steps=2")
    assert often.steps == [0, 4, 8, 12], "it is evaluated like the others"
    assert often.bytes_per_param == 6 * 4


def test_corrections_that_are_pending_at_the_end_are_applied():
    """The mean is untouched by corrections, so only the replicas' own loss and spread can tell."""
    prompt, tardy = (curve(workload(rounds=1, overlap=overlap), "noloco") for overlap in ("blocking", "delay=3"))
    assert tardy.replica_std[-1] == pytest.approx(prompt.replica_std[-1], rel=1e-4)


def test_each_replica_is_a_plain_torch_loop():
    work = workload()
    replicas = ReplicaBatch(work.module, work.settings)
    readers, same = (Readers(work.corpus, work.settings) for _ in range(2))
    for step in range(5):
        replicas.backward(readers.next(2))
        replicas.step((step + 1) / 5)
    batches = [same.next(2) for _ in range(5)]
    for row in range(4):
        module = build(MODEL, 256, 1)
        matrices = [p for p in module.parameters() if p.dim() >= 2]
        vectors = [p for p in module.parameters() if p.dim() < 2]
        decayed = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(decayed, betas=(0.9, 0.95))
        for step in range(5):
            adamw.zero_grad()
            next_token_loss(module, batches[step][row]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for group in adamw.param_groups:
                group["lr"] = learning_rate(INNER, (step + 1) / 5)
            adamw.step()
        expected = torch.cat([p.detach().flatten() for p in matrices + vectors])
        torch.testing.assert_close(replicas.theta[row], expected, rtol=1e-3, atol=2e-5)


def test_losses_under_attack_are_those_of_the_honest_replicas():
    nobody, ruined = curve(workload(), "noloco"), curve(workload(attack="scale", attackers=2), "noloco")
    defended = curve(workload(attack="scale", attackers=2, defences=True), "noloco")
    assert ruined.tokens[-1] == defended.tokens[-1] == nobody.tokens[-1] / 2
    assert ruined.replica_mean_loss[-1] > 2 * nobody.replica_mean_loss[-1]
    assert defended.replica_mean_loss[-1] < 1.05 * nobody.replica_mean_loss[-1]
    assert defended.failed_swaps + defended.scaled_swaps + defended.taken_back > 0


def test_own_modules_are_whole_and_nobody_elses():
    text = corpus().train
    parts = own_modules(text, 4)
    assert b"".join(part.tobytes() for part in parts) == text.tobytes()
    assert all(part.tobytes().endswith(b"\0") for part in parts[:-1])
    assert max(map(len, parts)) - min(map(len, parts)) < 2 * 400
    with pytest.raises(UsageError, match="too few modules"):
        own_modules(text, 50)


def test_without_iid_replicas_read_their_own_part_only():
    text = corpus()
    part = {bool(iid): Readers(text, Settings(**SMALL, inner=INNER, iid=iid)) for iid in (True, False)}
    own = own_modules(text.train, 4)
    for row, tokens in enumerate(part[False].next(10)):
        assert all(bytes(window.to(torch.uint8).tolist()) in own[row].tobytes() for window in tokens)
    outside = [bytes(w.to(torch.uint8).tolist()) not in own[0].tobytes() for w in part[True].next(20)[0]]
    assert any(outside)
