"""A transformers Trainer as a node, alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")


@pytest.mark.timeout(120)
def test_a_trainer_trains_a_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer, TrainingArguments

    from noloco_node import loop
    from noloco_node.loop.hugging_face import SwarmCallback

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            made = self.layer(inputs)
            return {"loss": nn.functional.mse_loss(made, labels), "logits": made}

    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path / "home"))
    run = tmp_path / "run.toml"
    run.write_text('name = "hf"\nrounds = 3\nmodel = { task = "net" }\ninner = { steps = 5, batch_tokens = 4 }\n')
    data = [{"inputs": torch.randn(8), "labels": torch.zeros(2)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=1000,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.01,
    )
    callback = SwarmCallback(lambda model, optimizer: loop.start(run, model, optimizer, listen="/ip4/127.0.0.1/tcp/0"))
    trainer = Trainer(Net(), arguments, train_dataset=data, callbacks=[callback])
    done = trainer.train()
    assert done.global_step == 15, "three rounds of five steps"
    assert callback.swarm is None
    assert list((tmp_path / "home").glob("runs/*/checkpoints/*"))
