"""The plugins for Lightning's Trainer and Fabric, against the loop written out: equal bit for bit.

Covers: xamp.integrations.lightning.
"""

from __future__ import annotations

import importlib
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from beside import LEVELS, batches, by_hand, loader, loss_of, net, same, sgd, state
from torch.optim import LBFGS

import xamp
from xamp.errors import PolicyError, StateError, UnsupportedPolicy

pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning: Any = importlib.import_module("lightning.pytorch")
    fabric: Any = importlib.import_module("lightning.fabric")
    integration: Any = importlib.import_module("xamp.integrations.lightning")

pytestmark = pytest.mark.filterwarnings("ignore")
all_levels = pytest.mark.parametrize("level", LEVELS)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Calls its child, not itself, as most do; the targets must stay fp32."""

    def __init__(self, overflow_at: int = -1) -> None:
        super().__init__()
        self.net = net()
        self.overflow_at = overflow_at
        self.seen: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        assert y.dtype is torch.float32
        loss = loss_of(self.net(x), y)
        return loss * float("inf") if self.global_step == self.overflow_at else loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(self.net(batch[0]))

    def configure_optimizers(self) -> Any:
        return sgd(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append([p.grad.clone() for p in xamp.master_params(optimizer) if p.grad is not None])


def trainer(tmp_path: pathlib.Path, level: str, settings: Any = None, **options: Any) -> Any:
    plugin = integration.TrainerPrecision(level, verbosity=0, **(settings or {}))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, **quiet, **options}
    return lightning.Trainer(
        max_epochs=options.pop("max_epochs", 1),
        default_root_dir=str(tmp_path),
        plugins=[plugin],
        **{k: v for k, v in given.items() if k != "max_epochs"},
    )


@all_levels
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.05, 1), (0.05, 2)])
def test_automatic_optimization(level: str, clip: float | None, accumulate: int, tmp_path: pathlib.Path) -> None:
    module = Module()
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    trainer(tmp_path, level, {"init_scale": 64.0} if level in ("O1", "O2") else None, **options).fit(module, loader())
    scale: dict[str, Any] = {"init_scale": 64.0} if level in ("O1", "O2") else {}
    wanted, _ = by_hand(level, batches(), clip=clip, accumulate=accumulate, **scale)
    assert same(state(module.net), state(wanted))
    assert {p.dtype for p in module.parameters()} == {torch.float32}, "and plain again"
    assert len(module.seen) == 6 // accumulate


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_skipped(level: str, tmp_path: pathlib.Path) -> None:
    module = Module(overflow_at=2)
    settings = {"init_scale": 64.0}
    run = trainer(tmp_path, level, settings)
    run.fit(module, loader())
    given = batches()
    wanted = net()
    optimizer: Any = sgd(wanted)
    xamp.initialize(wanted, optimizer, level, verbosity=0, init_scale=64.0)
    for index, (x, y) in enumerate(given):
        optimizer.zero_grad()
        loss = loss_of(wanted(x), y) * (float("inf") if index == 2 else 1.0)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert xamp.session(wanted).stats.skipped == 1
    assert same(state(module.net), state(wanted))
    assert run.precision_plugin.state_dict()["steps"] == {"applied": 5, "skipped": 1}


@all_levels
def test_a_run_that_resumes_has_the_same_bits(level: str, tmp_path: pathlib.Path) -> None:
    settings = {"init_scale": 64.0, "growth_interval": 2} if level in ("O1", "O2") else {}
    whole = Module()
    trainer(tmp_path, level, settings, max_epochs=2).fit(whole, loader())
    first, path = Module(), tmp_path / "middle.ckpt"

    class Save(lightning.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(path)

    trainer(tmp_path, level, settings, max_epochs=1, callbacks=[Save()]).fit(first, loader())
    saved = torch.load(path, weights_only=False)
    assert saved["TrainerPrecision"]["masters"] == [{}]
    assert {value.dtype for value in saved["state_dict"].values()} <= {torch.float32, torch.int64}
    second = Module()
    resumed = trainer(tmp_path, level, settings, max_epochs=2)
    resumed.fit(second, loader(), ckpt_path=str(path))
    assert same(state(second), state(whole))
    assert resumed.precision_plugin.state_dict()["steps"]["applied"] == 12


class Pair(lightning.LightningModule):  # type: ignore[misc]
    """Two optimizers by hand; each loss depends on both children, and ``toggle_optimizer`` keeps them apart."""

    def __init__(self, closure: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = net(3), net(4)
        self.closure = closure

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        for one in self.optimizers():
            self.toggle_optimizer(one)

            def backward(one: Any = one) -> None:
                if self.closure:
                    one.zero_grad()
                self.manual_backward(loss_of(self.a(x) + self.b(x), y))

            if self.closure:
                one.step(closure=backward)
            else:
                backward()
                self.clip_gradients(one, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                one.step()
                one.zero_grad()  # only now: nothing of the other's backward may have come to it
            self.untoggle_optimizer(one)

    def configure_optimizers(self) -> Any:
        return [sgd(self.a), sgd(self.b)]


@all_levels
@pytest.mark.parametrize("closure", [False, True])
def test_manual_optimization_with_two_toggled_optimizers(level: str, closure: bool, tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"init_scale": 64.0} if level in ("O1", "O2") else {}
    module = Pair(closure)
    trainer(tmp_path, level, settings).fit(module, loader())
    models = [net(3), net(4)]
    made: Any = [sgd(model) for model in models]
    if level in ("O1", "O4"):  # the whole step runs under the policy, and casts no result of a part
        settings["cast_model_outputs"] = False
    xamp.initialize(models, made, level, verbosity=0, **settings)
    for x, y in batches():
        for index, one in enumerate(made):
            for optimizer in made:
                optimizer.zero_grad()
            with xamp.session(one).autocast():
                other = models[1 - index](x).detach()
                mine = models[index](x)
                loss = loss_of(mine + other if index == 0 else other + mine, y)
            with xamp.scale_loss(loss, one) as scaled:
                scaled.backward()
            if not closure:
                xamp.clip_grad_norm_(one, 0.5)
            one.step()
    for found, wanted in zip((module.a, module.b), models, strict=True):
        for key, value in state(wanted).items():
            torch.testing.assert_close(state(found)[key].double(), value.double(), rtol=1e-6, atol=1e-6)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank may be made, and is gone afterwards."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@all_levels
def test_in_ddp_the_parameters_are_cast_before_it_wraps_them(
    level: str, tmp_path: pathlib.Path, one_rank: None
) -> None:
    module = Module()
    trainer(tmp_path, level, strategy="ddp", gradient_clip_val=0.05, use_distributed_sampler=False).fit(
        module, loader()
    )
    wanted, _ = by_hand(level, batches(), clip=0.05)
    assert same(state(module.net), state(wanted))


@all_levels
def test_fabric_in_ddp(level: str, one_rank: None) -> None:
    plugin = integration.FabricPrecision(level, verbosity=0)
    made = fabric.Fabric(accelerator="cpu", devices=1, strategy="ddp", plugins=plugin)
    made.launch()
    bare = net()
    model, optimizer = plugin.setup(made, bare, sgd(bare))
    for x, y in batches():
        optimizer.zero_grad()
        made.backward(loss_of(model(x), y))
        optimizer.step()
    wanted, _ = by_hand(level, batches())
    assert same(state(bare), state(wanted))


def test_a_closure_that_an_optimizer_needs(tmp_path: pathlib.Path) -> None:
    class Closing(Module):
        def configure_optimizers(self) -> Any:
            return LBFGS(self.parameters(), lr=0.1, max_iter=3)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    module, plain = Closing(), Closing()
    trainer(tmp_path, "O0").fit(module, loader())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    lightning.Trainer(max_epochs=1, enable_checkpointing=False, default_root_dir=str(tmp_path), **quiet).fit(
        plain, loader()
    )
    assert same(state(module), state(plain))
    with pytest.raises(UnsupportedPolicy, match=r"TrainerPrecision\('O1'\): LBFGS\.step needs a closure"):
        trainer(tmp_path, "O1").fit(Closing(), loader())


@all_levels
def test_validation_and_a_second_fit(level: str, tmp_path: pathlib.Path) -> None:
    module = Module()
    run = trainer(tmp_path, level)
    run.validate(module, loader(), verbose=False)
    reference = xamp.initialize(net(), level=level, verbosity=0).eval()
    with torch.no_grad():
        assert torch.equal(module.seen[0].float(), reference(batches()[0][0]))
    run.fit(module, loader())
    applied = run.precision_plugin.state_dict()["steps"]["applied"]
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert run.precision_plugin.state_dict()["steps"]["applied"] > applied or applied == 0


def test_the_scale_of_lightnings_own_checkpoint_is_taken_over(tmp_path: pathlib.Path) -> None:
    plugin = integration.TrainerPrecision("O1", verbosity=0)
    plugin.on_load_checkpoint({"MixedPrecision": torch.amp.GradScaler("cpu", init_scale=128.0).state_dict()})
    given: Any = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    seen: list[float] = []
    given.on_train_start = lambda: seen.append(xamp.loss_scale(given))
    lightning.Trainer(
        max_epochs=1, plugins=[plugin], enable_checkpointing=False, default_root_dir=str(tmp_path), **quiet
    ).fit(given, loader())
    # the state was lazily made by torch, so its scale is the one it was made with
    assert seen == [128.0]


def test_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(PolicyError, match=r"TrainerPrecision\(scale=\.\.\.\): no such setting"):
        integration.TrainerPrecision("O1", scale=2.0)
    with pytest.raises(PolicyError, match="O9"):
        integration.FabricPrecision("O9")
    assert integration.TrainerPrecision("O2").precision == "16-true"
    assert integration.FabricPrecision("O4").precision == "bf16-mixed"


# ---------------------------------------------------------------- Fabric


def fabric_loop(level: str, *, clip: float | None, whole: bool, **settings: Any) -> Any:
    plugin = integration.FabricPrecision(level, verbosity=0, **settings)
    made = fabric.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    bare = net()
    setup = (lambda *parts: plugin.setup(made, *parts)) if whole else made.setup
    model, optimizer = setup(bare, sgd(bare))
    for x, y in batches():
        optimizer.zero_grad()
        made.backward(loss_of(model(x), y))
        if clip is not None:
            made.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
    return bare, plugin


@all_levels
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("whole", [True, False])
def test_fabric(level: str, clip: float | None, whole: bool) -> None:
    settings: dict[str, Any] = {"init_scale": 64.0} if level in ("O1", "O2") else {}
    if not whole and level in ("O2", "O5"):
        with pytest.raises(StateError, match=r"Call plugin\.setup\(fabric, model, optimizer\)"):
            fabric_loop(level, clip=clip, whole=whole)
        return
    bare, plugin = fabric_loop(level, clip=clip, whole=whole, **settings)
    wanted, _ = by_hand(level, batches(), clip=clip, **settings)
    for key, value in state(wanted).items():  # fused and plain forms differ in the last bit
        torch.testing.assert_close(state(bare)[key].double(), value.double(), rtol=1e-5, atol=1e-6)
    assert plugin.metrics(wait=True)["steps_skipped"] == 0


def test_fabric_with_several_models_of_one_loss() -> None:
    plugin = integration.FabricPrecision("O2", verbosity=0, init_scale=64.0)
    made = fabric.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    bare = [net(3), net(4)]
    models, optimizers = plugin.setup(made, bare, sgd(bare[0]), sgd(bare[1]))
    for x, y in batches():
        made.backward(loss_of(models[0](x) + models[1](x), y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert xamp.session(bare[0]).stats.applied == 12
    saved = plugin.state_dict()
    assert saved["sessions"][0]["scalers"][0]["scale"] == 64.0
    plugin.load_state_dict(saved)
    with pytest.raises(StateError, match="it is of 0 sessions, and there are 1"):
        plugin.load_state_dict({"scaler": {}, "sessions": []})


def test_fabric_models_of_different_calls_must_be_told_apart() -> None:
    plugin = integration.FabricPrecision("O2", verbosity=0, init_scale=64.0)
    made = fabric.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    bare = [net(3), net(4)]
    first, second = (plugin.setup(made, model, sgd(model)) for model in bare)
    x, y = batches()[0]
    with pytest.raises(StateError, match=r"fabric\.backward\(loss, model=model\)"):
        made.backward(loss_of(first[0](x), y))
    for model, optimizer in (first, second):
        made.backward(loss_of(model(x), y), model=model)
        optimizer.step()
    assert [xamp.session(model).stats.applied for model in bare] == [1, 1]


def test_a_grad_scaler_state_of_fabric_comes_back() -> None:
    _, plugin = fabric_loop("O1", clip=None, whole=False, init_scale=64.0, growth_interval=2)
    state = plugin.state_dict()
    assert state["scaler"]["scale"] == 512.0
    _, other = fabric_loop("O1", clip=None, whole=False, init_scale=64.0)
    other.load_state_dict(state)
    assert other.metrics()["loss_scale"] == 512.0


def test_the_module_has_only_these_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Precision'"):
        _ = integration.Precision
    assert issubclass(integration.TrainerPrecision, lightning.plugins.precision.Precision)
