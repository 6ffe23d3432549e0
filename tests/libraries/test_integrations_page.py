"""docs/libraries.md: each block that needs a library runs as it stands there, and trains.

Covers: docs/libraries.md, xamp.integrations.
"""

from __future__ import annotations

import importlib
import pathlib
import warnings
from typing import Any

import docs_blocks
import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp

for _needed in ("transformers", "timm", "lightning"):
    pytest.importorskip(_needed)

PAGE = "libraries.md"
pytestmark = pytest.mark.filterwarnings("ignore")
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def images(channels: int = 3, size: int = 32) -> Batches:
    torch.manual_seed(0)
    return [(torch.randn(2, channels, size, size), torch.randint(0, 4, (2,))) for _ in range(3)]


def rows() -> Batches:
    torch.manual_seed(0)
    return [(torch.randn(4, 6), torch.randint(0, 4, (4,))) for _ in range(4)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def gpt2() -> Any:
    transformers = library("transformers")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, pad_token_id=0)
    return transformers.GPT2LMHeadModel(shape)


def sentences() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": tokens, "labels": tokens}] * 3


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def run(word: str, **names: Any) -> dict[str, Any]:
    """Execute the block of the page that contains ``word``."""
    return docs_blocks.run(PAGE, {"torch": torch, "xamp": xamp, **names}, word)


def assert_moved(model: Any, before: dict[str, torch.Tensor]) -> None:
    """Check that parameters moved, on whichever device a library has put the model."""
    after = model.state_dict()
    assert any(not torch.equal(after[key].to(value.device), value) for key, value in before.items() if key in after)


def assert_trained(model: Any, optimizer: Any, before: dict[str, torch.Tensor], steps: int) -> None:
    """Check that so many steps were taken, and that parameters moved."""
    stats = xamp.session(optimizer).stats
    assert stats.applied + stats.skipped == steps
    assert stats.applied > 0
    assert_moved(model, before)


def test_transformers() -> None:
    model = gpt2()
    before = state(model)
    names = run("model.generate(", model=model, loader=sentences() * 3, prompt=torch.tensor([[1, 2, 3]]))
    assert_trained(model, names["optimizer"], before, 9)
    assert names["tokens"].shape == (1, 7)


def test_hugging_faces_trainer(tmp_path: pathlib.Path) -> None:
    model = gpt2()
    before = state(model)
    tokens = torch.randint(1, 32, (8,), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": tokens, "labels": tokens}] * 8
    names = run("TrainingArguments(", model=model, folder=str(tmp_path), dataset=dataset)
    assert xamp.session(model).policy.level == "O2"
    assert xamp.session(model).stats.applied > 0
    assert_moved(model, before)
    assert names["trainer"].state.global_step == 4
    assert (tmp_path / "checkpoint-4" / "xamp.pt").is_file()


def test_accelerate(tmp_path: pathlib.Path) -> None:
    library("accelerate.state").AcceleratorState._reset_state(True)
    model = net()
    before = state(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 4, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    given = {"model": model, "optimizer": optimizer, "loader": loader, "criterion": nn.CrossEntropyLoss()}
    run("accelerator.accumulate", **given, folder=str(tmp_path))
    assert_trained(model, optimizer, before, 4)
    assert (tmp_path / "custom_checkpoint_0.pkl").is_file()


def test_fabric(tmp_path: pathlib.Path) -> None:
    library("lightning.fabric")
    model = net()
    before = state(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    batches: Any = rows() * 3
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    given = {"model": model, "optimizer": optimizer, "loader": loader, "criterion": nn.CrossEntropyLoss()}
    run("fabric.backward", **given, path=str(tmp_path / "file.ckpt"))
    assert_trained(model, optimizer, before, 12)
    assert set(torch.load(tmp_path / "file.ckpt", weights_only=False)) == {"model", "optimizer", "xamp"}


def test_lightning(tmp_path: pathlib.Path) -> None:
    lightning = library("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    module = Module()
    before = state(module)
    data = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*rows(), strict=True)))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {**quiet, "accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    names = run("TrainerPrecision(", module=module, loader=loader, options=options)
    assert names["trainer"].global_step == 8
    assert_moved(module, before)


def test_timm() -> None:
    timm = library("timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4)
    before = state(model)
    names = run("create_optimizer_v2", model=model, loader=images() * 2, criterion=nn.CrossEntropyLoss())
    assert_trained(model, names["optimizer"], before, 6)


def test_diffusers() -> None:
    diffusers = library("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    before = state(unet)
    loader = [image for image, _ in images(1, 8)]
    names = run("add_noise", unet=unet, loader=loader, scheduler=diffusers.DDPMScheduler())
    assert_trained(unet, names["optimizer"], before, 3)
    assert names["average"].updates == 3


def test_peft(tmp_path: pathlib.Path) -> None:
    library("peft")
    names = run("LoraConfig(", model=gpt2(), loader=sentences(), folder=str(tmp_path), targets=["c_attn"])
    assert xamp.session(names["optimizer"]).stats.applied == 3
    assert any(tmp_path.iterdir())
    moved = [p for name, p in names["model"].named_parameters() if "lora_B" in name]
    assert moved
    assert all(bool(p.any()) for p in moved), "they start as zeros"


def test_pyg() -> None:
    geometric, data = library("torch_geometric.nn"), library("torch_geometric.data")
    torch.manual_seed(0)
    model = geometric.GCN(6, 8, 2, 4)
    before = state(model)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graphs = [data.Data(x=x, edge_index=edges, y=y) for x, y in rows()]
    optimizer = SGD(model.parameters(), lr=0.1)
    run("edge_index", model=model, optimizer=optimizer, loader=graphs * 3, criterion=nn.CrossEntropyLoss())
    assert_trained(model, optimizer, before, 12)


def test_pytorch_optimizer() -> None:
    library("pytorch_optimizer")
    model = net()
    before = state(model)
    names = run("import Lion", model=model, loader=rows() * 3, criterion=nn.CrossEntropyLoss())
    assert_trained(model, names["optimizer"], before, 12)
