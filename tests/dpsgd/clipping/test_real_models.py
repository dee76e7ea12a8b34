"""Both engines on models of transformers and timm, built from a config: nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpsgd.clipping.case import (
    TOLERANCE,
    B,
    Case,
    clipped,
    error_of,
    has_engines,
    truth_of,
)
from tests.helpers import trainable

ATTENTION = ("eager", "sdpa")
VALUES_STEER_PYTHON = "data-dependent control flow"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # What these libraries warn of while they are imported or built is not ours to fix.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _transformers() -> Any:
    reason = "transformers is not installed: pip install 'opake-lightning[models]'"
    library = pytest.importorskip("transformers", reason=reason)
    library.logging.set_verbosity_error()
    return library


def _timm() -> Any:
    # It needs a torchvision that was built for the torch at hand, CPU or CUDA.
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm is not installed, or not usable: {error}")
    return timm


def _case(net: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any) -> Case:
    net = net.double().train()

    def loss_fn(params: Any, batch: Any) -> Tensor:
        call = lambda **inputs: torch.func.functional_call(net, params, (), inputs)  # noqa: E731
        return loss(call, batch)

    return Case(trainable(net), loss_fn, batch)


def _ids() -> Tensor:
    return torch.randint(1, 11, (B, 6))


def _padded() -> tuple[Tensor, Tensor]:
    kept = torch.arange(6) < torch.arange(3, 3 + B)[:, None]
    return _ids() * kept, kept.long()


def _gpt2(attention: str) -> nn.Module:
    library = _transformers()
    return library.GPT2LMHeadModel(
        library.GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _bert(attention: str) -> nn.Module:
    library = _transformers()
    return library.BertForSequenceClassification(
        library.BertConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=9, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=0
    )
    return losses.sum(1) / (labels[:, 1:] != 0).sum(1)


def gpt2(attention: str) -> Case:
    return _case(
        _gpt2(attention),
        lambda call, ids: _next_token(call(input_ids=ids, use_cache=False).logits, ids),
        _ids(),
    )


def gpt2_with_padding(attention: str) -> Case:
    return _case(
        _gpt2(attention),
        lambda call, batch: _next_token(
            call(input_ids=batch[0], attention_mask=batch[1], use_cache=False).logits, batch[0]
        ),
        _padded(),
    )


def bert(attention: str) -> Case:
    return _case(
        _bert(attention),
        lambda call, batch: F.cross_entropy(
            call(input_ids=batch[0]).logits, batch[1], reduction="none"
        ),
        (_ids(), torch.randint(0, 3, (B,))),
    )


def bert_with_padding(attention: str) -> Case:
    return _case(
        _bert(attention),
        lambda call, batch: call(input_ids=batch[0], attention_mask=batch[1]).logits.sin().sum(1),
        _padded(),
    )


def vit(attention: str) -> Case:
    library = _transformers()
    net = library.ViTForImageClassification(
        library.ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, attn_implementation=attention,
        )
    )  # fmt: skip
    images = torch.randn(B, 3, 8, 8).double()
    return _case(net, lambda call, x: call(pixel_values=x).logits.sin().sum(1), images)


def timm_resnet(_: str) -> Case:
    library = _timm()
    norm = library.layers.GroupNorm
    net = library.models.ResNet(
        library.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=3, stem_width=8,
        channels=(8, 8, 16, 16), norm_layer=lambda n, **more: norm(n, 4, **more),
    )  # fmt: skip
    images = torch.randn(B, 3, 32, 32).double()
    return _case(net, lambda call, x: call(x=x).sin().sum(1), images)


def timm_vit(_: str) -> Case:
    net = _timm().models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=3, init_values=0.1
    )
    images = torch.randn(B, 3, 8, 8).double()
    return _case(net, lambda call, x: call(x=x).sin().sum(1), images)


MODELS = [
    pytest.param(make, attention, beyond_vmap, id=f"{make.__name__}-{attention}")
    for make, beyond_vmap in [
        (gpt2, ()),
        (gpt2_with_padding, ("sdpa",)),
        (bert, ()),
        (bert_with_padding, ATTENTION),
        (vit, ()),
        (timm_resnet, ()),
        (timm_vit, ()),
    ]
    for attention in (ATTENTION if "timm" not in make.__name__ else ("own",))
]


@pytest.mark.parametrize("engine", ["vmap", "auto"])
@pytest.mark.parametrize(("make", "attention", "beyond_vmap"), MODELS)
def test_a_real_model_equals_a_loop(make, attention, beyond_vmap, engine):
    if engine == "auto" and not has_engines():
        pytest.skip("clipped_grad has one engine only")
    case = make(attention)
    if engine == "vmap" and attention in beyond_vmap:
        # Whether a mask is needed is decided by looking at it.
        with pytest.raises(RuntimeError, match=VALUES_STEER_PYTHON):
            clipped(case, 1.0, engine=engine)
        return
    truth = truth_of(case)
    for bound in (1e-3 * min(truth.norms), sorted(truth.norms)[1], 1e3 * max(truth.norms)):
        for size in (None, 3):
            got = clipped(case, bound, engine=engine, microbatch_size=size)
            assert error_of(got.pytree, truth.sums(bound)) < TOLERANCE[torch.float64]
