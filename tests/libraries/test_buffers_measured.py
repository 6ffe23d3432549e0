"""The rule for floating buffers where parameters are cast, on architectures of several libraries: docs/levels.md.

Covers: xamp.sessions.lowering.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_loop import Buffers, buffers, library, lower, up
from torch import nn

import xamp

transformers = library("transformers")
timm = library("timm")
diffusers = library("diffusers")
segmentation = library("torchvision.models.segmentation")

LONG = 1024
Made = tuple[nn.Module, dict[str, Any]]
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def ids() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 64, (1, LONG))}


def causal(kind: str, config_of: str = "", **options: Any) -> Made:
    config = getattr(transformers, f"{config_of or kind}Config")(
        **{**SMALL, "max_position_embeddings": LONG, **options}
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config), ids()


def deepseek() -> Made:
    return causal(
        "DeepseekV3",
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_key_value_heads=2,
    )


def esm() -> Made:
    config = transformers.EsmConfig(
        **SMALL,
        intermediate_size=64,
        pad_token_id=1,
        position_embedding_type="rotary",
        max_position_embeddings=LONG + 2,
    )
    return transformers.EsmModel(config, add_pooling_layer=False), ids()


def bert() -> Made:
    config = transformers.BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=LONG)
    return transformers.BertModel(config), ids()


def gptj() -> Made:
    config = transformers.GPTJConfig(vocab_size=64, n_embd=64, n_layer=2, n_head=2, rotary_dim=32, n_positions=LONG)
    return transformers.GPTJForCausalLM(config), ids()


def m2m() -> Made:
    config = transformers.M2M100Config(
        vocab_size=64,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=LONG + 2,
    )
    return transformers.M2M100Model(config), {**ids(), "decoder_input_ids": torch.randint(3, 64, (1, 16))}


def encodec() -> Made:
    config = transformers.EncodecConfig(
        num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16, num_lstm_layers=1, upsampling_ratios=[4, 2]
    )
    model = transformers.EncodecModel(config)
    for name, codebook in model.named_buffers():
        if name.endswith(".embed"):
            codebook.normal_()
    return model, {"input_values": torch.randn(1, 1, 4096)}


def image(name: str, size: int = 32, **options: Any) -> Made:
    return timm.create_model(name, num_classes=4, **options), {"x": torch.randn(2, 3, size, size)}


def unet() -> Made:
    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16,),
        norm_num_groups=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    return model, {"sample": torch.randn(1, 1, 8, 8), "timestep": torch.tensor([700])}


def lraspp() -> Made:
    model = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    return model, {"input": torch.randn(2, 3, 32, 32)}


class Tutorial(nn.Module):
    """The encoding of positions that torch's tutorial has, in front of torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LONG).float(), 10000.0 ** (-torch.arange(0, 64, 2) / 64))
        self.register_buffer("pe", torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
        self.layer = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        assert isinstance(self.pe, torch.Tensor)
        return self.layer(x + self.pe)


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "Llama": lambda: causal("Llama", intermediate_size=64),
    "Mixtral": lambda: causal("Mixtral", intermediate_size=64, num_local_experts=4, num_key_value_heads=2),
    "Gemma 3": lambda: causal("Gemma3", "Gemma3Text", intermediate_size=64, head_dim=32, num_key_value_heads=1),
    "GPT-NeoX": lambda: causal("GPTNeoX", intermediate_size=64),
    "DeepSeek-V3": deepseek,
    "GPT-J": gptj,
    "ESM": esm,
    "M2M-100": m2m,
    "Encodec": encodec,
    "BERT": bert,
    "ViT": lambda: image("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2),
    "EVA-02": lambda: image("eva02_tiny_patch14_224", 56, img_size=56, embed_dim=48, depth=2, num_heads=2),
    "Swin": lambda: image(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4
    ),
    "Swin v2": lambda: image(
        "swinv2_tiny_window8_256", img_size=32, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4
    ),
    "EfficientNet": lambda: image("tinynet_e"),
    "UNet2DModel": unet,
    "LR-ASPP": lraspp,
    "torch's tutorial": lambda: (Tutorial(), {"x": torch.randn(1, LONG, 64)}),
}


def output_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(5)
    with torch.no_grad():
        found = up(model(**batch))
    if isinstance(found, dict):
        found = found[0] if hasattr(found, "to_tuple") else next(iter(found.values()))
    for name in ("sample", "audio_values"):
        found = getattr(found, name, found)
    return (found[0] if isinstance(found, tuple) else found).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_rule_on_an_architecture(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model, batch = ARCHITECTURES[name]()
    model.eval()
    for param in model.parameters():  # attention of a new model hardly depends on positions
        if param.dim() == 2:
            nn.init.normal_(param, std=2.0 / param.shape[1] ** 0.5)
    exact = output_of(model, batch)

    def off(found: torch.Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    def at_o5(**options: Any) -> tuple[float, int, list[str]]:
        made = copy.deepcopy(model)
        caplog.clear()
        before = {id(b) for b in made.buffers()}
        xamp.initialize(made, level="O5", **options)
        cast = sum(id(b) not in before for b in made.buffers())
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        return off(output_of(made, batch)), cast, warnings

    def by_hand() -> float | str:
        made = copy.deepcopy(model)
        for param in made.parameters():
            param.data = param.data.bfloat16()
        try:
            return off(output_of(made, {key: lower(value, torch.bfloat16) for key, value in batch.items()}))
        except RuntimeError as error:
            return "error" if "dtype" in str(error) or "type" in str(error) else f"error: {error}"

    cast_off, cast, warnings = at_o5()
    named = [found for text in warnings for found in names_in(text)]
    classes = {of for _, of in named} - {type(model).__name__}
    keep = {type(module) for module in model.modules() if type(module).__name__ in classes}
    kept_off = at_o5(keep_fp32=list(keep))[0] if keep else None
    tables = ", ".join(sorted({of_module.rpartition(".")[2] for of_module, _ in named}))
    buffers.append(Buffers(name, cast, tables, cast_off, kept_off, by_hand()))
    assert kept_off is None or kept_off <= cast_off * 1.2, "what the warning advises does not help"


def names_in(warning: str) -> list[tuple[str, str]]:
    """The buffers and their classes that a warning names."""
    found = re.search(r"float16: (.*?)\. (?:Tables|If one)", warning)
    return [] if found is None else re.findall(r"(\S+) of (\w+)", found[1])
