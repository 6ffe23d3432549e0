"""transformers: tiny models of seven kinds, generation, files, gradient checkpointing, LoRA by PEFT, its Trainer.

Covers: xamp.casting.forward, xamp.casting.export, xamp.sessions.lowering.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from library_loop import LEVELS, Case, by_hand, check, distance, exactly, library, loss_of
from torch import nn
from torch.optim import SGD, AdamW

import xamp

transformers = library("transformers")
peft = library("peft")

WORDS = 64
CAST = ["O2", "O3", "O5"]


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape)


def decoder(kind: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": WORDS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **more,
        }
    )
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, num_labels=3
    )
    made: nn.Module = transformers.BertForSequenceClassification(config)
    return made


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    made: nn.Module = transformers.T5ForConditionalGeneration(config)
    return made


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    config.num_labels = 4
    made: nn.Module = transformers.ViTForImageClassification(config)
    return made


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    made: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return made


def checkpointed(kind: str) -> nn.Module:
    made: Any = decoder(kind)
    made.gradient_checkpointing_enable()
    return made  # type: ignore[no-any-return]


def lora() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    made: nn.Module = peft.get_peft_model(gpt2(), config)
    for name, param in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)  # zero at the start, and then the first gradients of A are zero
    return made


def text() -> dict[str, Any]:
    found = ids(3, 12)
    return {"input_ids": found, "attention_mask": torch.ones_like(found), "labels": found}


def classes() -> dict[str, Any]:
    found = ids(3, 12)
    mask = torch.ones_like(found)
    mask[0, 8:] = 0
    return {"input_ids": found, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}


def adamw(params: Any) -> torch.optim.Optimizer:
    return AdamW(params, lr=1e-3, eps=1e-4)  # eps of the default is zero in fp16, at O3


CASES = [
    Case("transformers", "BERT", bert, classes, loss_of, adamw),
    Case("transformers", "GPT-2", gpt2, text, loss_of, adamw),
    Case("transformers", "T5", t5, lambda: {"input_ids": ids(3, 8), "labels": ids(3, 6)}, loss_of),
    Case("transformers", "Llama", lambda: decoder("Llama"), text, loss_of),
    Case("transformers", "Llama, gradient checkpointing", lambda: checkpointed("Llama"), text, loss_of),
    Case("transformers", "Mixtral", lambda: decoder("Mixtral", num_local_experts=4), text, loss_of),
    Case(
        "transformers",
        "ViT",
        vit,
        lambda: {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 1, 2])},
        loss_of,
    ),
    Case(
        "transformers",
        "Whisper",
        whisper,
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": ids(2, 6)},
        loss_of,
    ),
    Case("peft", "LoRA of GPT-2", lora, text, loss_of),
]


SAMPLE = ("BERT", "Llama", "LoRA of GPT-2")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "case", [case if str(case) in SAMPLE else pytest.param(case, marks=pytest.mark.thorough) for case in CASES], ids=str
)
def test_trains_as_by_hand_and_resumes(case: Case, level: str) -> None:
    check(case, level)


@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [gpt2, t5, whisper], ids=["GPT-2", "T5", "Whisper"])
def test_generates_as_a_model_cast_by_hand(make: Any, level: str) -> None:
    torch.manual_seed(3)
    model = make().eval()
    torch.manual_seed(3)
    plain = make().eval()
    dtype = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    xamp.initialize(model, level=level, verbosity=0, methods=("forward", "generate"), op_policy="native")
    prompt = {"input_features": torch.randn(2, 8, 32)} if make is whisper else {"input_ids": ids(2, 5)}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(**prompt, **options)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in prompt.items()}
    lowered = torch.float16 if level == "O1" else torch.bfloat16
    with torch.autocast("cpu", lowered, enabled=level in ("O1", "O4")):
        expected = plain.to(dtype).generate(**given, **options)
    assert torch.equal(found, expected)


def trained(model: nn.Module, level: str, batch: Any = text, **options: Any) -> Any:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    xamp.initialize(model, optimizer, level, verbosity=0, **options)
    for _ in range(2):
        optimizer.zero_grad()
        with xamp.scale_loss(model(**batch()).loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_files_come_back_exact(level: str, tmp_path: pathlib.Path) -> None:
    model: Any = decoder("Llama")
    trained(model, level)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    mine = model.state_dict()
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert all(torch.equal(value, mine[key]) for key, value in again.state_dict().items())
    lower = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)
    assert model.dtype is lower, "the model computes as before"


@pytest.mark.parametrize("level", CAST)
def test_a_part_of_the_model_is_written_exact_too(level: str, tmp_path: pathlib.Path) -> None:
    model: Any = decoder("Llama")
    trained(model, level)
    model.model.save_pretrained(tmp_path)
    again = transformers.LlamaModel.from_pretrained(tmp_path)
    mine = model.model.state_dict()
    assert all(torch.equal(value, mine[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_come_back_exact(level: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model: Any = lora()
    trained(model, level)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path)
    mine = {k: v for k, v in model.state_dict().items() if "lora" in k}
    assert mine
    assert all(torch.equal(value, mine[key]) for key, value in again.state_dict().items() if "lora" in key)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_loaded_in_half_trains_as_its_fp32_twin(level: str, tmp_path: pathlib.Path) -> None:
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    decoder("Llama").to(dtype).save_pretrained(tmp_path)  # type: ignore[operator]
    found = []
    for wanted in (dtype, torch.float32):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=wanted)
        torch.manual_seed(5)
        trained(model, level, keep_fp32=["*rotary_emb"])
        found.append(exactly(model))
    assert distance(*found) == 0.0


@pytest.mark.parametrize("level", CAST)
def test_a_rotary_table_that_loses_digits_is_named(level: str, caplog: pytest.LogCaptureFixture) -> None:
    xamp.initialize(decoder("Llama", head_dim=64), level=level)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "model.rotary_emb.inv_freq of LlamaRotaryEmbedding" in warning
    assert "keep_fp32=" in warning


class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    """transformers' Trainer, with the two lines of xamp in its step."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, inputs)
        with xamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm  # it would clip the gradients of the model, and at O2 and O5 they are with the masters


@pytest.mark.parametrize("level", LEVELS)
def test_the_trainer_beside_xamp(level: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(100)
    rows = [{"input_ids": row, "labels": row} for row in ids(4, 12)]
    case = Case(
        "transformers",
        "GPT-2 in Trainer",
        gpt2,
        lambda: {key: torch.stack([row[key] for row in rows]) for key in rows[0]},
        loss_of,
        lambda params: SGD(params, lr=0.05),
    )
    model, optimizer = case.start()
    model.eval()  # no dropout, whose random numbers the Trainer would draw elsewhere
    xamp.initialize(model, optimizer, level, verbosity=0, op_policy="native")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        max_grad_norm=0.0,
        save_strategy="no",
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))

    def still() -> nn.Module:
        made = gpt2()
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return made

    expected = by_hand(Case("transformers", "", still, case.batch, loss_of, case.optimizer), level, steps=3)[-1]
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    # The Trainer shuffles the rows, so that sums in 16 bits run in another order.
    assert distance(dict(again.named_parameters()), expected) < (1e-5 if level in ("O1", "O4") else 1e-4)
