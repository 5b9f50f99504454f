"""A real `transformers.Trainer` in a swarm, by the callback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from attach_daemon import STEPS, PlayedDaemon, small_model, small_run

import node
from node.home import Home
from node.trainer import wire
from node.trainer.models import flatten

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data")
def test_a_hugging_face_trainer_trains_rounds_until_the_run_ends(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from node.trainer.callback import SwarmCallback

    manifest, theta = small_run(tmp_path / "artifacts")
    daemon = PlayedDaemon(Home(tmp_path), manifest, theta, folder=tmp_path, rounds=3)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(0, 16, (32,), generator=generator) for _ in range(256)]

    def user() -> int:
        with node.attach(tmp_path, name="hugging face") as swarm:
            model = small_model(seed=3)
            arguments = TrainingArguments(
                output_dir=str(tmp_path / "hf"),
                per_device_train_batch_size=4,
                max_steps=1000,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                logging_steps=2,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            trainer = Trainer(
                model=model,
                args=arguments,
                train_dataset=[{"input_ids": sample, "labels": sample} for sample in samples],  # type: ignore[arg-type]
                callbacks=[SwarmCallback(swarm)],
            )
            trainer.train()
            final = np.empty_like(daemon.theta)
            flatten(model, final)
            assert np.array_equal(final, daemon.theta), "the model holds the run's last state"
            return trainer.state.global_step

    async def main() -> None:
        async with daemon.serving():
            with trio.fail_after(120):
                steps = await trio.to_thread.run_sync(user)
        assert steps == 3 * STEPS
        contributions = daemon.of(wire.Contribution)
        assert [contribution.tokens for contribution in contributions] == [STEPS * 4 * 32] * 3
        assert contributions[-1].loss is not None
        assert contributions[0].loss is not None
        assert contributions[-1].loss < contributions[0].loss
        assert all(contribution.ranges_done == () for contribution in contributions)

    trio.run(main)
