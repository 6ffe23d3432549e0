"""accelerate and Hugging Face's Trainer, against the loop written out.

Covers: xamp.integrations.accelerate, xamp.integrations.transformers.
"""

from __future__ import annotations

import importlib
import pathlib
import warnings
from typing import Any

import pytest
import torch
from beside import LEVELS, batches, by_hand, loader, loss_of, net, same, sgd, state

import xamp
from xamp.errors import PolicyError

pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate: Any = importlib.import_module("accelerate")
    transformers: Any = importlib.import_module("transformers")
    integration: Any = importlib.import_module("xamp.integrations.accelerate")
    trainers: Any = importlib.import_module("xamp.integrations.transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
all_levels = pytest.mark.parametrize("level", LEVELS)


def accelerator(**options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True, **options)


def train(made: Any, model: Any, optimizer: Any, data: Any, clip: float | None) -> None:
    for x, y in data:
        with made.accumulate(model):
            made.backward(loss_of(model(x), y))
            if made.sync_gradients and clip is not None:
                made.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@all_levels
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.05, 1), (0.05, 2)])
def test_accelerate(level: str, clip: float | None, accumulate: int) -> None:
    settings = {"init_scale": 64.0} if level in ("O1", "O2") else {}
    made = accelerator(gradient_accumulation_steps=accumulate)
    bare = net()
    model, optimizer, data = integration.prepare(made, bare, sgd(bare), loader(), level=level, verbosity=0, **settings)
    train(made, model, optimizer, data, clip)
    wanted, _ = by_hand(level, batches(), clip=clip, accumulate=accumulate, **settings)
    assert same(state(bare), state(wanted))
    assert xamp.session(optimizer).stats.applied == 6 // accumulate


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_saved_and_loaded(level: str, tmp_path: pathlib.Path) -> None:
    def start() -> Any:
        made = accelerator()
        bare = net()
        return made, bare, integration.prepare(made, bare, sgd(bare), loader(), level=level, verbosity=0)

    made, bare, (model, optimizer, data) = start()
    train(made, model, optimizer, data, 0.1)
    made.save_state(str(tmp_path))
    train(made, model, optimizer, data, 0.1)
    again, resumed, (model, optimizer, data) = start()
    again.load_state(str(tmp_path))
    assert xamp.session(resumed).stats.applied + xamp.session(resumed).stats.skipped == 6
    train(again, model, optimizer, data, 0.1)
    assert same(state(resumed), state(bare))


def test_values_are_clipped_where_they_are_stepped() -> None:
    made = accelerator()
    bare = net()
    model, optimizer = integration.prepare(made, bare, sgd(bare), level="O2", verbosity=0, init_scale=64.0)
    x, y = batches()[0]
    made.backward(loss_of(model(x), y))
    made.clip_grad_value_(model.parameters(), 1e-3)
    grads = [p.grad for p in xamp.master_params(optimizer) if p.grad is not None]
    assert grads
    assert max(float(g.abs().max()) for g in grads) == pytest.approx(1e-3)


def test_a_mixed_precision_of_its_own_is_refused() -> None:
    bare = net()
    with pytest.raises(PolicyError, match=r"the Accelerator has mixed_precision='bf16'"):
        integration.prepare(accelerator(mixed_precision="bf16"), bare, sgd(bare))
    with pytest.raises(PolicyError, match="no model is among the objects"):
        integration.prepare(accelerator(), sgd(bare))


# ---------------------------------------------------------------- Hugging Face's Trainer


def gpt2() -> Any:
    torch.manual_seed(0)
    shape = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, pad_token_id=0)
    shape.update({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
    return transformers.GPT2LMHeadModel(shape)


def tokens() -> list[dict[str, torch.Tensor]]:
    made = torch.randint(1, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in made]


def arguments(folder: pathlib.Path, **options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    given = {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "optim": "sgd"}
    return transformers.TrainingArguments(str(folder), **{**given, **quiet, **options})


class InOrder(trainers.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """As ``trainers.Trainer``, with the data in order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return None


def settings_of(level: str) -> dict[str, Any]:
    return {"level": level, "verbosity": 0, **({"init_scale": 64.0} if level in ("O1", "O2") else {})}


@all_levels
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer(level: str, accumulate: int, tmp_path: pathlib.Path) -> None:
    model = gpt2()
    given = arguments(
        tmp_path, max_grad_norm=0.5, gradient_accumulation_steps=accumulate, per_device_train_batch_size=4 // accumulate
    )
    run = InOrder(model, given, train_dataset=tokens(), xamp_settings=settings_of(level))
    run.train()
    wanted = gpt2()
    decayed = run.get_decay_parameter_names(wanted)
    groups: list[list[Any]] = [[], []]  # the Trainer's groups, in whose order norms are added up
    for name, param in wanted.named_parameters():
        groups[name not in decayed].append(param)
    optimizer: Any = torch.optim.SGD([{"params": group} for group in groups], lr=0.05)
    xamp.initialize(wanted, optimizer, **settings_of(level))
    rows, size = tokens(), 4 // accumulate
    for index in range(0, 16, 4):
        optimizer.zero_grad()
        for start in range(index, index + 4, size):
            batch = torch.stack([row["input_ids"] for row in rows[start : start + size]])
            loss = wanted(
                input_ids=batch, labels=batch, num_items_in_batch=torch.tensor(32.0)
            ).loss  # as the Trainer counts
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        xamp.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    assert same(state(model), state(wanted))
    logged = [row for row in run.state.log_history if "loss" in row]
    assert len(logged) == 4
    assert logged[0]["loss_scale"] == (64.0 if level in ("O1", "O2") else 1.0)
    assert all("steps_skipped" in row and "grad_norm" in row for row in logged)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_trainer_resumes(level: str, tmp_path: pathlib.Path) -> None:
    whole = gpt2()
    options = {"save_steps": 2, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3}
    settings = {**settings_of(level), **({"growth_interval": 1} if level != "O5" else {})}
    first = InOrder(whole, arguments(tmp_path, **options), train_dataset=tokens(), xamp_settings=settings)
    first.train()
    resumed = gpt2()
    second = InOrder(resumed, arguments(tmp_path, **options), train_dataset=tokens(), xamp_settings=settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.state.global_step == 4
    assert same(state(resumed), state(whole))
    found, wanted = (xamp.session(model).state_dict()["scalers"] for model in (resumed, whole))
    assert found == wanted


def test_the_trainers_own_mixed_precision_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PolicyError, match="mixed_precision='bf16'"):
        trainers.Trainer(gpt2(), arguments(tmp_path, bf16=True), train_dataset=tokens())
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = trainers.Other
