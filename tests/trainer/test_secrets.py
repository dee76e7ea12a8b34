"""The key is where it must be, and nowhere else: everything written and printed is searched."""

from __future__ import annotations

import base64
import copy
import io
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from opake_lightning import DPSGD, PrivacyBudget, PrivacyError
from opake_lightning.dpftrl.noise import lambda_cgd_strategy
from opake_lightning.random import RngKey, key_from_environment, key_from_file
from tests.trainer.cases_dpftrl import BAND, mf_plan
from tests.trainer.helpers import CLIPPING, Points, Validated, make_loader, make_trainer, plan
from tests.trainer.key_forms import forms

KEY = RngKey.from_hex("9ac3f1e07b5d28469ac4d0e1b7f35c82")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
]


class Tuned(Validated):
    """A module with hyperparameters, one of which is the plan, and a loss that may fail."""

    def __init__(self, privacy: Any, lr: float = 0.1, sizes: Any = (1, 2)) -> None:
        super().__init__(privacy)
        self.save_hyperparameters(ignore=["privacy"])
        self.fails_at = -1

    def per_example_loss(self, batch: Any) -> Tensor:
        if self._trainer is not None and self.global_step == self.fails_at:
            raise ValueError("the loss of the user")
        return super().per_example_loss(batch)


class Held(pl.LightningDataModule):
    """Hyperparameters of a data module."""

    def __init__(self, **named: Any) -> None:
        super().__init__()
        self.save_hyperparameters(named)

    def train_dataloader(self) -> Any:
        return make_loader()


def found_in(content: bytes | str, *keys: RngKey) -> list[bytes]:
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return [form for key in keys for form in forms(key) if form in raw]


def files_with(folder: Path, *keys: RngKey) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return sorted(file.name for file in files if found_in(file.read_bytes(), *keys))


# -- the search itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda key: f"x{key.hex()}y",
        lambda key: key.hex().upper(),
        lambda key: f"seed: {key.bits},",
        lambda key: repr(key.bits.to_bytes(16, "big")),
        lambda key: str(list(key.bits.to_bytes(16, "big"))),
        lambda key: pickle.dumps(key),
        lambda key: pickle.dumps([key], 2),
        lambda key: b"." + key.bits.to_bytes(16, "big") + b".",
        *(
            lambda key, n=n: base64.b64encode(bytes(range(n)) + key.bits.to_bytes(16, "big") + b"x")
            for n in range(6)
        ),
        lambda key: base64.urlsafe_b64encode(key.bits.to_bytes(16, "little")),
        lambda key: (
            torch.frombuffer(bytearray(key.bits.to_bytes(16, "little")), dtype=torch.int64)
            .numpy()
            .tobytes()
        ),
        lambda key: f"{key.bits >> 64} {key.bits % 2**64}",
    ],
)
def test_the_search_finds_a_key_however_it_is_written(write):
    assert found_in(write(KEY), KEY)
    assert not found_in(write(RngKey(KEY.bits ^ (1 << 65 | 1 << 3))), KEY)


# -- training -------------------------------------------------------------------------------------


def told_by(net: Any, error: BaseException, *, local: bool) -> str:
    """All that somebody might print of a run and its parts, and of its failure."""
    run = net.optimizers(use_pl_optimizer=False)._run
    things = [net, net.privacy, run, run.mechanism, run.state, run.record, run.fit, run.journal]
    things += [run.state.noise, run.state.clip, run.position(), run.past(), run.record.public()]
    things += [net.privacy_spent(), net.hparams, run.mechanism.fingerprint(), run._step]
    things += [run._step.noise_fn, run._step.grad_fn, net.optimizers(use_pl_optimizer=False)]
    whole = traceback.TracebackException.from_exception(error, capture_locals=local)
    return "".join([*map(repr, things), *map(str, things), *whole.format(), repr(error.args)])


PLANS = {
    "dpsgd": (lambda **now: plan(**now), RichProgressBar, RichModelSummary),
    "adaptive": (
        lambda **now: plan(clipping_norm=CLIPPING["adaptive"], **now),
        TQDMProgressBar,
        ModelSummary,
    ),
    "dpftrl": (lambda **now: mf_plan(**now), TQDMProgressBar, ModelSummary),
    "dpftrl_pair": (
        lambda **now: mf_plan(second_moment_strategy=BAND, **now),
        RichProgressBar,
        RichModelSummary,
    ),
    "apart": (lambda **now: plan(key_in_checkpoint=False, **now), RichProgressBar, ModelSummary),
    "dpftrl_apart": (
        lambda **now: mf_plan(strategy=lambda_cgd_strategy(0.5), key_in_checkpoint=False, **now),
        TQDMProgressBar,
        RichModelSummary,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_run_writes_its_key_to_full_checkpoints_alone(name, tmp_path, capfd, caplog):
    make, bar, summary = PLANS[name]
    caplog.set_level("DEBUG")
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb", log_graph=False)]
    light = ModelCheckpoint(
        tmp_path / "light", "{epoch}", save_weights_only=True, save_top_k=-1, monitor="val_loss"
    )
    full = ModelCheckpoint(tmp_path / "full", "{step}", every_n_train_steps=2, save_top_k=-1)
    net = Tuned(make(key=KEY), sizes=[3, {"a": 4}])
    net.log_not_private = True
    net.fails_at = 6
    said: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = make_trainer(
            tmp_path,
            callbacks=[bar(refresh_rate=1), summary(), light, full, PrivacyBudget(100, delta=1e-5)],
            logger=loggers,
            log_every_n_steps=1,
            enable_progress_bar=True,
            enable_model_summary=True,
        )
        with pytest.raises(ValueError, match="the loss of the user") as failed:
            trainer.fit(net, make_loader(), make_loader(shuffle=False))
        said.append(told_by(net, failed.value, local=True))
        live = net._dp.state.noise.key
        other = Tuned(make(key=RngKey(live.bits ^ 1)))
        with pytest.raises(RuntimeError, match="the digest of the key") as refused:
            make_trainer(tmp_path).fit(
                other, make_loader(), ckpt_path=tmp_path / "full/step=4.ckpt"
            )
        # Among the locals is the checkpoint as it was loaded, which shows what it holds.
        said.append(told_by(other, refused.value, local="apart" in name))
        net.fails_at = -1
        trainer.save_checkpoint(tmp_path / "now.ckpt", weights_only=True)
        resumed = Tuned(make(key=KEY))
        make_trainer(tmp_path).fit(resumed, make_loader(), ckpt_path=tmp_path / "full/step=4.ckpt")
        torch.save(resumed.state_dict(), tmp_path / "state.pt")
        loaded = Tuned.load_from_checkpoint(tmp_path / "now.ckpt", privacy=make(key=KEY))
        said.append(repr(vars(loaded._dp)))
    keys = {KEY, live, resumed._dp.state.noise.key, getattr(net._dp.state.clip, "key", KEY)}
    expected = [] if "apart" in name else ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert files_with(tmp_path, *keys) == expected
    written = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert written >= {".ckpt", ".csv", ".yaml", ".steps", ".pt"}
    assert any("tfevents" in file.name for file in tmp_path.rglob("*"))
    out, err = capfd.readouterr()
    shown = "".join([out, err, caplog.text, *said, *(str(w.message) for w in warned)])
    assert "ε" in out + err  # the bar was there
    assert "private run" in caplog.text
    assert "the loss of the user" in shown
    assert found_in(shown, *keys) == []


# -- exports --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dpsgd", "dpftrl"])
def trained(request, tmp_path_factory):
    net = Tuned(PLANS[request.param][0](key=KEY))
    trainer = make_trainer(tmp_path_factory.mktemp("trained"), max_epochs=1)
    trainer.fit(net, make_loader())
    return net


# Seated parameters are parts of one tensor, of which all is saved.
@pytest.mark.filterwarnings("ignore:No complete tensor found in the group:UserWarning")
def test_torch_export_holds_no_key(trained, tmp_path):
    program = torch.export.export(trained.net.eval(), (Points().x[:2],))
    torch.export.save(program, tmp_path / "net.pt2")
    assert (tmp_path / "net.pt2").stat().st_size > 0
    assert files_with(tmp_path, KEY, trained._dp.record.key) == []
    assert not found_in(str(program), KEY, trained._dp.record.key)


# What torch 2.14 says of both, and what files hold that people still write with them.
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["trace", "script", "net"])
def test_torchscript_holds_no_key(trained, tmp_path, how):
    trained.eval()
    if how == "net":
        script = torch.jit.script(trained.net)
    elif how == "trace":
        script = trained.to_torchscript(method="trace", example_inputs=Points().x[:2])
    else:
        script = trained.to_torchscript()
    torch.jit.save(script, tmp_path / "net.ts")
    assert files_with(tmp_path, KEY, trained._dp.record.key) == []


def test_onnx_holds_no_key(trained, tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript, which is not installed")
    trained.to_onnx(tmp_path / "net.onnx", Points().x[:2], dynamo=True)
    assert files_with(tmp_path, KEY, trained._dp.record.key) == []


@pytest.mark.parametrize("kept_apart", [False, True])
def test_a_pickled_module_holds_no_live_key(trained, kept_apart, tmp_path):
    """Nor does ``torch.save(module)``. A plan that names its key holds that one."""
    assert found_in(pickle.dumps(trained.privacy), KEY)
    net = copy.deepcopy(trained).train()
    if kept_apart:
        net.privacy = plan(key=KEY, key_in_checkpoint=False)
        make_trainer(tmp_path).fit(net, make_loader())
    # What a spawn of the module hands on, and what the plan holds, is not asked for here.
    live, net.privacy = net._dp.record.key, None
    buffer = io.BytesIO()
    torch.save(net, buffer)
    for written in (buffer.getvalue(), pickle.dumps(net), pickle.dumps(net._dp)):
        assert not found_in(written, KEY)
        assert not found_in(written, live)
    again = pickle.loads(pickle.dumps(net))
    assert again.privacy_spent() == net.privacy_spent()
    assert again._dp.record.key is None


# -- hyperparameters ------------------------------------------------------------------------------


class Careless(Validated):
    def __init__(self, privacy: Any = None, **named: Any) -> None:
        super().__init__(privacy or plan(key=KEY))
        self.save_hyperparameters()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("privacy", plan(key=KEY)),
        ("privacy", mf_plan(key=KEY)),
        ("secret", KEY),
        ("nested", {"a": [0, (KEY,)]}),
        ("secret", KEY.hex()),
        ("secret", KEY.hex().upper()),
        ("secret", KEY.bits),
        ("secret", {"seed": str(KEY.bits)}),
    ],
)
@pytest.mark.parametrize("where", ["module", "data"])
def test_hyperparameters_with_a_key_are_refused_before_they_are_logged(
    name, value, where, tmp_path
):
    module = Careless(**{name: value}) if where == "module" else Careless(plan(key=KEY))
    if where == "data":
        module = Tuned(plan(key=KEY))
    data = Held(**{name: value}) if where == "data" else Held()
    trainer = make_trainer(tmp_path, logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)])
    match = rf"hyperparameter {name} of .* holds the run's key.*ignore=\['{name}'\]"
    with pytest.raises(PrivacyError, match=match) as refused:
        trainer.fit(module, datamodule=data)
    assert not found_in(str(refused.value), KEY)
    assert files_with(tmp_path, KEY) == []


def test_other_hyperparameters_are_logged_as_ever(tmp_path):
    class Usual(Validated):
        def __init__(self, seed: int = 7, lr: float = 0.1, name: str = "a", flag: bool = True):
            super().__init__()
            self.save_hyperparameters()

    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path), max_epochs=1)
    trainer.fit(Usual(), datamodule=Held(size=24, plan=DPSGD.__name__))
    logged = next(tmp_path.rglob("hparams.yaml")).read_text()
    assert "seed: 7" in logged
    assert "size: 24" in logged


# -- where keys come from -------------------------------------------------------------------------


def test_a_key_that_is_gone_is_not_needed_to_save(tmp_path, monkeypatch):
    """The plan is asked for when a fit begins; a file on a disk that leaves later does no harm."""
    (tmp_path / "run.key").write_text(KEY.hex())
    (tmp_path / "run.key").chmod(0o600)
    monkeypatch.setenv("RUN_KEY", KEY.hex())
    assert key_from_environment("RUN_KEY") == key_from_file(tmp_path / "run.key")

    class Kept(Tuned):
        def configure_privacy(self) -> Any:
            return plan(key=key_from_file(tmp_path / "run.key"), key_in_checkpoint=False)

        def on_train_batch_end(self, *args: Any) -> None:
            (tmp_path / "run.key").unlink(missing_ok=True)

    save = ModelCheckpoint(tmp_path / "a", "{step}", every_n_train_steps=2, save_top_k=-1)
    make_trainer(tmp_path, callbacks=[save]).fit(Kept(None), make_loader())
    assert len(list((tmp_path / "a").glob("*.ckpt"))) == 4
    assert files_with(tmp_path, KEY) == []
