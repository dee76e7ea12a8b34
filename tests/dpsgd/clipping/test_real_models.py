"""Models of transformers, peft and timm, built from a config: nothing is downloaded.

Each is called as its users call it, padding masks and mean losses included, with its own parameters
in place, and takes two passes at most: one more where Python asks whether a mask masks anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.dpsgd.clipping.case import B, Case, clipped, counted, own_parameters, truth_of

ATTENTION = ("eager", "sdpa")
VOCABULARY, STEPS = 11, 6


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


def _case(net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Case:
    net = net.double().train()
    return Case(own_parameters(net), lambda params, batch: loss(net, batch), batch)


def equals_a_loop(case: Case, *, tolerance: float = 1e-10, passes: int = 2) -> None:
    """Compare sums and count passes; that rows ran alone would be a warning, and so an error."""
    truth = truth_of(case)
    norms = truth.norms
    assert min(norms) > 1e-6
    for bound in (1e-3 * min(norms), sorted(norms)[1], 1e3 * max(norms)):
        for size in (case.size, 3):
            with warnings.catch_warnings(), counted() as count:
                warnings.filterwarnings("error", "clipping one example at a time")
                got, _ = clipped(case, bound, microbatch_size=size)
            assert truth.error_of(got.pytree, bound) < tolerance
            if size == case.size:
                assert count.passes <= passes


# -- transformers ---------------------------------------------------------------------------------


def _ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (B, STEPS))


def _padded() -> tuple[Tensor, Tensor]:
    """Ids and the mask of those that count; the last row has no padding."""
    kept = torch.arange(STEPS) < torch.arange(3, 3 + B)[:, None]
    return _ids() * kept, kept.long()


def _gpt2(attention: str, dropout: float = 0.0) -> nn.Module:
    library = _transformers()
    return library.GPT2LMHeadModel(
        library.GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=VOCABULARY, n_positions=8,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0,
            eos_token_id=0, attn_implementation=attention,
        )
    )  # fmt: skip


def _llama(attention: str, dropout: float = 0.0) -> nn.Module:
    library = _transformers()
    return library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=9,
            attention_dropout=dropout, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _bert(attention: str, dropout: float = 0.0) -> nn.Module:
    library = _transformers()
    return library.BertForSequenceClassification(
        library.BertConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=9, num_labels=3,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _distilbert(attention: str, dropout: float = 0.0) -> nn.Module:
    library = _transformers()
    return library.DistilBertForSequenceClassification(
        library.DistilBertConfig(
            vocab_size=VOCABULARY, dim=8, hidden_dim=16, n_layers=2, n_heads=2,
            max_position_embeddings=9, num_labels=3, dropout=dropout, attention_dropout=dropout,
            seq_classif_dropout=dropout, attn_implementation=attention,
        )
    )  # fmt: skip


def _t5(attention: str, dropout: float = 0.0) -> nn.Module:
    library = _transformers()
    return library.T5ForConditionalGeneration(
        library.T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2,
            relative_attention_num_buckets=8, dropout_rate=dropout, decoder_start_token_id=0,
            pad_token_id=0, attn_implementation=attention,
        )
    )  # fmt: skip


def _vit(attention: str, dropout: float = 0.0) -> nn.Module:
    library = _transformers()
    return library.ViTForImageClassification(
        library.ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, attn_implementation=attention,
        )
    )  # fmt: skip


def _classified(net: nn.Module, batch: Any) -> Tensor:
    ids, kept, labels = batch
    return F.cross_entropy(net(input_ids=ids, attention_mask=kept).logits, labels)


def _next_token(net: nn.Module, batch: Any) -> Tensor:
    ids, kept = batch
    logits = net(input_ids=ids, attention_mask=kept, use_cache=False).logits
    labels = ids.masked_fill(kept == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _all_tokens(net: nn.Module, ids: Tensor) -> Tensor:
    logits = net(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def _translated(net: nn.Module, batch: Any) -> Tensor:
    ids, kept, labels = batch
    logits = net(input_ids=ids, attention_mask=kept, labels=labels, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _pictured(net: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(net(pixel_values=images).logits, labels)


def _labels() -> Tensor:
    return torch.tensor([0, 2, 1, 2])


def _targets() -> Tensor:
    return torch.tensor([[3, 4, 5, 1], [2, 1, -100, -100], [6, 7, 1, -100], [9, 1, -100, -100]])


Make = tuple[Callable[..., nn.Module], Callable[[nn.Module, Any], Tensor], Callable[[], Any], int]
MODELS: dict[str, Make] = {
    "bert": (_bert, _classified, lambda: (*_padded(), _labels()), 2),
    "distilbert": (_distilbert, _classified, lambda: (*_padded(), _labels()), 2),
    "gpt2": (_gpt2, _next_token, _padded, 2),
    "gpt2-without-padding": (_gpt2, _all_tokens, _ids, 1),
    "llama": (_llama, _next_token, _padded, 2),
    "llama-without-padding": (_llama, _all_tokens, _ids, 1),
    "t5": (_t5, _translated, lambda: (*_padded(), _targets()), 2),
    "vit": (_vit, _pictured, lambda: (torch.randn(B, 3, 8, 8).double(), _labels()), 1),
}
models = pytest.mark.parametrize("name", MODELS)


def _model_case(name: str, attention: str, dropout: float = 0.0) -> Case:
    make, loss, batch, _ = MODELS[name]
    try:
        net = make(attention, dropout)
    except ValueError as error:
        pytest.skip(str(error).splitlines()[0])  # not every model has both kinds of attention
    return _case(net, loss, batch())


@models
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_model_of_transformers_equals_a_loop(name, attention):
    equals_a_loop(_model_case(name, attention), passes=MODELS[name][3])


@models
@pytest.mark.parametrize("attention", ATTENTION)
def test_with_dropout_it_takes_no_more_passes(name, attention):
    case = _model_case(name, attention, dropout=0.1)
    with warnings.catch_warnings(), counted() as count:
        warnings.filterwarnings("error", "clipping one example at a time")
        got, _ = clipped(case, 1.0, microbatch_size=case.size)
    assert count.passes <= MODELS[name][3]
    assert bool(got.report.norms.isfinite().all())
    assert bool((got.report.norms > 0).all())


@pytest.mark.parametrize("make", [_bert, _distilbert, _gpt2, _llama, _t5])
def test_a_model_s_own_loss_equals_a_loop(make):
    """By ``labels=``: a mean, in float32, whatever the model is in."""
    ids, kept = _padded()
    if make in (_bert, _distilbert):
        labels = _labels()
    else:
        labels = _targets() if make is _t5 else ids.masked_fill(kept == 0, -100)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        ids, kept, labels = batch
        return net(input_ids=ids, attention_mask=kept, labels=labels).loss  # type: ignore[no-any-return]

    equals_a_loop(_case(make("sdpa"), loss, (ids, kept, labels)), tolerance=1e-5)


def test_by_functional_call_it_equals_a_loop():
    net = _bert("sdpa").double()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        ids, kept, labels = batch
        inputs = {"input_ids": ids, "attention_mask": kept}
        return F.cross_entropy(torch.func.functional_call(net, params, (), inputs).logits, labels)

    equals_a_loop(Case(params, loss_fn, (*_padded(), _labels())))


@pytest.mark.parametrize("checkpoints", [None, True, False], ids=["none", "re-entrant", "new"])
def test_gradient_checkpointing_equals_a_loop(checkpoints):
    net = _gpt2("sdpa")
    if checkpoints is not None:
        net.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    equals_a_loop(_case(net, _next_token, _padded()))


@pytest.mark.parametrize("make", [_bert, _distilbert])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_adapters_of_peft_equal_a_loop(make, checkpoints):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net = make("sdpa")
    if checkpoints:
        net.gradient_checkpointing_enable({"use_reentrant": True})
        net.enable_input_require_grads()
    modules = ["query", "value"] if make is _bert else ["q_lin", "v_lin"]
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, lora_dropout=0.0, target_modules=modules
    )
    net = peft.get_peft_model(net, config)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:  # zero at first, and so would be the gradient of A
            nn.init.normal_(parameter)
    case = _case(net, _classified, (*_padded(), _labels()))
    assert any("lora_A" in name for name in case.params)
    equals_a_loop(case)


def test_adapters_with_magnitudes_equal_a_loop():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
        use_dora=True,
    )  # fmt: skip
    net = peft.get_peft_model(_llama("sdpa"), config)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    equals_a_loop(_case(net, _next_token, _padded()))


# -- timm -----------------------------------------------------------------------------------------


def _timm_resnet() -> nn.Module:
    library = _timm()
    norm = library.layers.GroupNorm
    return library.models.ResNet(
        library.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=3, stem_width=8,
        channels=(8, 8, 16, 16), norm_layer=lambda n, **more: norm(n, 4, **more),
    )  # fmt: skip


def _timm_vit() -> nn.Module:
    return _timm().models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=8, depth=2, num_heads=2, num_classes=3, init_values=0.1
    )


@pytest.mark.parametrize("make", [_timm_resnet, _timm_vit])
def test_a_model_of_timm_equals_a_loop(make):
    batch = torch.randn(B, 3, 32, 32).double(), _labels()
    equals_a_loop(_case(make(), lambda net, b: F.cross_entropy(net(b[0]), b[1]), batch), passes=1)


# -- small ones -----------------------------------------------------------------------------------


class _UNet(nn.Module):
    """Two levels, GroupNorm, a time embedding, attention in the middle: as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8))
        self.enter = nn.Conv2d(1, 8, 3, padding=1)
        self.norm1, self.down = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm2, self.middle = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.norm3, self.leave = nn.GroupNorm(4, 16), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None].to(x) * torch.tensor([1.0, 0.1]).to(x)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None]
        first = self.enter(x)
        h = self.down(F.silu(self.norm1(first))) + time
        h = h + self.middle(F.silu(self.norm2(h)))
        tokens = h.flatten(2).mT
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        h = self.up(tokens.mT.unflatten(2, h.shape[2:]))
        return self.leave(F.silu(self.norm3(torch.cat([h, first], 1))))


def test_a_diffusion_model_equals_a_loop():
    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, noise, t = batch
        share = (t.to(x) / 10)[:, None, None, None]
        return F.mse_loss(net((1 - share) * x + share * noise, t), noise)

    images = torch.randn(B, 1, 8, 8).double(), torch.randn(B, 1, 8, 8).double()
    equals_a_loop(_case(_UNet(), loss, (*images, torch.tensor([1, 9, 4, 2]))), passes=1)


class _VQVAE(nn.Module):
    """Vectors are replaced by the nearest code, and gradients go straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 4, stride=2, padding=1), nn.GELU())
        self.codes = nn.Embedding(6, 4)
        self.decoder = nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, 4)
        distances = (
            flat.square().sum(1, keepdim=True)
            - 2 * flat @ self.codes.weight.t()
            + self.codes.weight.square().sum(1)
        )
        chosen = self.codes(distances.argmin(1)).view(z.shape)
        code_loss = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(chosen.detach(), z)
        through = z + (chosen - z).detach()
        return F.mse_loss(self.decoder(through.permute(0, 3, 1, 2)), x) + code_loss


def test_a_quantised_autoencoder_equals_a_loop():
    images = (torch.randn(B, 1, 8, 8).double(),)
    equals_a_loop(_case(_VQVAE(), lambda net, b: net(b[0]), images), passes=1)


class _Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(3, 6, 3, padding=1), nn.GRU(6, 5, bidirectional=True)
        self.out = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).permute(2, 0, 1)
        return self.out(self.rnn(x)[0]).log_softmax(2)


@pytest.mark.parametrize("alike", [True, False])
def test_connectionist_temporal_classification_equals_a_loop(alike):
    targets = torch.tensor([[1, 2, 3], [4, 4, 0], [2, 0, 0], [1, 3, 0]])
    lengths = torch.full((B,), 3) if alike else torch.tensor([3, 2, 1, 2])
    targets = targets.clamp(min=1) if alike else targets
    steps = torch.full((B,), 8) if alike else torch.tensor([8, 7, 8, 6])

    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, targets, steps, lengths = batch
        return F.ctc_loss(net(x), targets, steps, lengths, zero_infinity=True)

    batch = torch.randn(B, 3, 8).double(), targets, steps, lengths
    # The lengths of targets are numbers of Python to torch.
    equals_a_loop(_case(_Recogniser(), loss, batch), passes=1 if alike else 2)


class _LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.rnn = nn.LSTM(6, 6, 2, batch_first=True)
        self.out = nn.Linear(6, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if lengths is None:
            return self.out(self.rnn(x)[0])
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], True, total_length=ids.shape[1])
        return self.out(hidden)


@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrent_language_model_equals_a_loop(packed):
    def loss(net: nn.Module, batch: Any) -> Tensor:
        ids, kept = batch
        logits = net(ids, *[kept.sum(1)] * packed)
        labels = ids.masked_fill(kept == 0, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    equals_a_loop(_case(_LanguageModel(), loss, _padded()), passes=1)
