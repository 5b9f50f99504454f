"""The trainer's checkpoint: what comes back is what was saved, and what is torn is set aside."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import msgspec
import pytest
import torch

from node.manifest import Inner
from node.trainer.checkpoint import (
    INDEX,
    CheckpointStore,
    Description,
    Place,
    optimizer_tensors,
    restore_optimizer,
)
from node.trainer.inner import inner_optimizer

RUN = "ab" * 32


def description(round: int = 3) -> Description:
    return Description(
        run_id=RUN,
        round=round,
        inner_steps=17,
        joined_late=True,
        places=(Place(epoch=0, unit=5, sequences=3),),
    )


def model_and_optimizer(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    return model, inner_optimizer(model, Inner(lr=1e-2))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    inputs = torch.randn(6, 5)
    for _ in range(3):
        step(model, optimizer, inputs)
    store = CheckpointStore(tmp_path, run_id=RUN)
    assert store.save(description(), optimizer_tensors(model, optimizer))
    twin = copy.deepcopy(model)
    drawn = torch.rand(3)
    step(model, optimizer, inputs)

    restored = CheckpointStore(tmp_path, run_id=RUN).load(3)
    assert restored is not None
    assert restored.description == description()
    fresh = inner_optimizer(twin, Inner(lr=1e-2))
    assert restore_optimizer(twin, fresh, restored.tensors)
    assert torch.equal(torch.rand(3), drawn), "random numbers go on where they were"
    step(twin, fresh, inputs)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)), name


def test_weight_decay_is_for_matrices_only() -> None:
    model, optimizer = model_and_optimizer()
    decay = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is held for held in group["params"])
    }
    assert decay == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }


def test_an_older_checkpoint_fits_and_a_newer_one_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = model_and_optimizer()
    store = CheckpointStore(tmp_path, run_id=RUN)
    store.save(description(round=5), optimizer_tensors(model, optimizer))
    assert store.load(9) is not None
    assert caplog.text == ""
    assert store.load(4) is None
    assert "it is of round 5, and training resumes at round 4" in caplog.text
    assert store.load(9) is None, "set aside"


@pytest.mark.parametrize("fault", ["cut", "flipped", "missing", "index cut", "index flipped", "other run", "elsewhere"])
def test_what_is_torn_or_foreign_is_set_aside_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer, torch.randn(2, 5))
    store = CheckpointStore(tmp_path, run_id=RUN)
    store.save(description(), optimizer_tensors(model, optimizer))
    (tensors,) = tmp_path.glob("state-*.safetensors")
    index = tmp_path / INDEX
    data = bytearray(tensors.read_bytes())
    match fault:
        case "cut":
            tensors.write_bytes(data[:-9])
        case "flipped":
            data[-1] ^= 1
            tensors.write_bytes(data)
        case "missing":
            tensors.unlink()
        case "index cut":
            index.write_bytes(index.read_bytes()[:-20])
        case "index flipped":
            index.write_bytes(index.read_bytes().replace(b'"inner_steps":17', b'"inner_steps":18'))
        case "other run":
            store = CheckpointStore(tmp_path, run_id="cd" * 32)
        case "elsewhere":
            content = msgspec.json.decode(index.read_bytes())
            content["file"] = "../" + tensors.name
            index.write_bytes(msgspec.json.encode(content))
    with caplog.at_level(logging.WARNING):
        assert store.load(3) is None
    assert len(caplog.records) == 1
    assert "the inner optimizer starts fresh" in caplog.text
    assert not index.exists()
    assert store.load(3) is None
    assert len(caplog.records) == 1
    store.save(description(), optimizer_tensors(model, optimizer), now=True)
    assert CheckpointStore(tmp_path, run_id=RUN).load(3) is not None


def test_only_the_newest_tensors_stay_on_disk(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    store = CheckpointStore(tmp_path, run_id=RUN)
    for round in range(4):
        step(model, optimizer, torch.randn(2, 5))
        store.save(description(round), optimizer_tensors(model, optimizer), now=True)
    assert len(list(tmp_path.iterdir())) == 2
    restored = store.load(3)
    assert restored is not None
    assert restored.description.round == 3


def test_saving_takes_a_bounded_share_of_the_time(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    tensors = optimizer_tensors(model, optimizer)
    rare = CheckpointStore(tmp_path / "rare", run_id=RUN, largest_share=1e-6)
    assert rare.save(description(), tensors)
    assert not rare.save(description(), tensors)
    assert rare.save(description(), tensors, now=True)
    eager = CheckpointStore(tmp_path / "eager", run_id=RUN, largest_share=1.0)
    assert eager.save(description(), tensors)
    assert eager.save(description(), tensors)


def test_a_full_disk_is_loud_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = model_and_optimizer()
    (tmp_path / "file").write_text("in the way")
    store = CheckpointStore(tmp_path / "file" / "trainer", run_id=RUN)
    assert not store.save(description(), optimizer_tensors(model, optimizer))
    assert "cannot be written" in caplog.text


def test_the_state_of_another_model_is_not_taken(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer, torch.randn(2, 5))
    tensors = optimizer_tensors(model, optimizer)
    wider = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    other = inner_optimizer(wider, Inner(lr=1e-2))
    assert not restore_optimizer(wider, other, tensors)
    assert not other.state
