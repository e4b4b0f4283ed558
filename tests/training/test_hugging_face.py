"""Models of Hugging Face as they are, built from small configurations: no look-alikes, no hub."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import fedquilt

SAMPLES, TOKENS, WORDS, PADDED = 24, 8, 40, 3
_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_CLIENTS = [list(range(i, SAMPLES, 4)) for i in range(4)]
_RUN = {
    "num_rounds": 2,
    "local_epochs": 1,
    "learning_rate": 0.05,
    "availability": "always",
    "clients_per_round": 1.0,
    "output_dir": None,
    "quiet": True,
}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_SMALL))


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=16, n_layers=1, n_heads=2, hidden_dim=32
    )
    return transformers.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL))


def vit() -> nn.Module:
    sizes = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


FAMILIES: list[Callable[[], nn.Module]] = [bert, distilbert, gpt2, llama, vit]
CAUSAL = (gpt2, llama)
MODES = {
    "certified": {},
    "fedavg": {},
    "fixed_dp": {"noise_layers": "all"},
    "quap_fl": {"noise_layers": "all"},
    "quap_fl_client": {},
}
SHORT = [(make, "certified") for make in FAMILIES]
LONG = [(make, mode) for make in FAMILIES for mode in MODES if mode != "certified"]


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model of this kind and data for it; of causal ones half the samples are padded."""
    draws = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(3, WORDS, (SAMPLES, TOKENS), generator=draws)
    if make is vit:
        pixels = torch.randn(SAMPLES, 3, 8, 8, generator=draws)
        return model, {"pixel_values": pixels, "labels": (ids[:, 0] > 20).long()}
    mask = torch.ones_like(ids)
    if make not in CAUSAL:
        return model, {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": (ids[:, 0] > 20).long(),
        }
    mask[::2, -PADDED:] = 0
    labels = torch.where(mask > 0, ids, -100)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(make: Callable[[], nn.Module], mode: str) -> tuple[Any, dict[str, torch.Tensor]]:
    model, data = made(make)
    own = {"loss": "model", "metrics": "perplexity,accuracy"} if make in CAUSAL else {}
    settings: dict[str, Any] = {**_RUN, **MODES[mode], **own}
    return fedquilt.run(model, data, data, _CLIENTS, mode=mode, **settings), data


@pytest.mark.parametrize(
    ("make", "mode"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_real_model_of_each_family_trains_and_every_parameter_of_it_moves(
    make: Callable[[], nn.Module], mode: str
) -> None:
    before = dict(made(make)[0].named_parameters())
    done, _ = trained(make, mode)
    after = dict(done.model.named_parameters())
    assert type(done.model) is type(made(make)[0])
    assert list(after) == list(before)
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    if mode == "certified":  # noise is on each of them
        assert moved == set(before)
        assert done.statement.is_bounded
        assert set(done.statement.covered) == set(before)
        assert done.statement.uncovered == ()
    assert len(moved) > len(before) / 2
    assert all(math.isfinite(value) for value in done.metrics.values())


@pytest.mark.parametrize("make", CAUSAL)
def test_metrics_of_a_causal_model_shift_as_its_own_loss_does(
    make: Callable[[], nn.Module],
) -> None:
    done, data = trained(make, "fedavg")
    done.model.eval()
    with torch.no_grad():
        inputs = {key: value for key, value in data.items() if key != "labels"}
        scores = done.model(**inputs).logits.double().numpy()
    labels = data["labels"].numpy()
    losses, right = [], []
    for sample, wanted in zip(scores, labels, strict=True):
        for place in range(TOKENS - 1):
            if wanted[place + 1] != -100:
                row = sample[place] - sample[place].max()
                losses.append(np.log(np.exp(row).sum()) - row[wanted[place + 1]])
                right.append(int(row.argmax()) == wanted[place + 1])
    assert done.metrics["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert done.metrics["perplexity"] == pytest.approx(math.exp(done.metrics["loss"]), rel=1e-5)
    assert done.metrics["accuracy"] == pytest.approx(np.mean(right))


def test_metrics_of_tokens_that_are_classified_where_they_stand_do_not_shift() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**_SMALL, num_labels=3)
    ids = torch.randint(3, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    data = {"input_ids": ids, "labels": ids % 3}
    done = fedquilt.run(
        transformers.BertForTokenClassification(config),
        *(data, data, _CLIENTS),
        **{**_RUN, "mode": "fedavg", "loss": "model", "metrics": "accuracy"},
    )
    with torch.no_grad():
        guesses = done.model.eval()(input_ids=ids).logits.argmax(-1)
    assert done.metrics["accuracy"] == pytest.approx(float((guesses == ids % 3).double().mean()))


def test_what_peft_made_trainable_is_trained_and_loads_again_with_peft_alone(
    tmp_path: Path,
) -> None:
    import peft

    model, data = made(llama)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    settings = {**_RUN, "mode": "certified", "loss": "model", "metrics": "perplexity"}
    done = fedquilt.run(adapted, data, data, _CLIENTS, **settings)
    wanted = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert wanted
    assert set(done.statement.covered) == wanted
    assert done.statement.uncovered == ()
    done.model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file()
    assert (tmp_path / "adapter_model.safetensors").is_file()
    fresh = llama()
    fresh.load_state_dict(base)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    ids = data["input_ids"]
    with torch.no_grad():
        ours, theirs = done.model.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits
        assert not torch.equal(theirs, made(llama)[0].eval()(input_ids=ids).logits)
    assert torch.equal(ours, theirs)
