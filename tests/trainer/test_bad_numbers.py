"""Numbers of a plan that are none, or of a size that nothing fits: refused early, and by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from opake_lightning import DPSGD
from opake_lightning.optimizers import adamw, sgd
from opake_lightning.scheduling import linear_schedule
from tests.trainer.bad_input import both, refused
from tests.trainer.helpers import Net, Points, make_loader, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"clipping_norm": 1e-45}, "clipping_norm / batch_size .*clipping_norm=1e-45.*float32"),
        ({"clipping_norm": 1e39}, r"clipping_norm / batch_size .*clipping_norm=1e\+39.*float32"),
        ({"clipping_norm": 1e30}, r"standard deviation .*clipping_norm=1e\+30.*Lower"),
        ({"noise_multiplier": 1e30}, r"standard deviation .*noise_multiplier=1e\+30.*Lower"),
        ({"noise_multiplier": 1e300}, r"standard deviation .*noise_multiplier=1e\+300.*float32"),
        ({"noise_multiplier": 1e-40}, "standard deviation .*noise_multiplier=1e-40.*float32"),
    ],
    ids=str,
)
@both
def test_noise_that_float32_cannot_hold(make_plan, numbers, match, tmp_path):
    """Noise of 1e-46 is zero, under a gradient that is not; of 1e39 it is infinite."""
    refused(tmp_path, match, module=Net(make_plan(**numbers)), error=ValueError)


class Flat(Net):
    """A loss without slope, so that all that moves is noise."""

    def per_example_loss(self, batch):
        return super().per_example_loss(batch) * 0


@pytest.mark.parametrize("bound", [1e-30, 1e-15, 1e15])
@both
@pytest.mark.usefixtures("same_noise")
def test_noise_follows_a_clipping_norm_of_any_size(make_plan, bound, tmp_path):
    """A step of lr / C times noise of C is the same step whatever C is."""
    moves = []
    for norm in (bound, 1.0):
        module = Flat(make_plan(clipping_norm=norm), optimizer=lambda c=norm: sgd(0.1 / c))
        before = [p.detach().clone() for p in module.parameters()]
        make_trainer(tmp_path, max_epochs=1).fit(module, make_loader())
        moves.append([p - q for p, q in zip(module.parameters(), before, strict=True)])
    for got, want in zip(*moves, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sigma", [1e-8, 1e8])
@both
def test_an_epsilon_for_noise_of_any_size(make_plan, sigma, tmp_path):
    module = Net(make_plan(noise_multiplier=sigma))
    make_trainer(tmp_path).fit(module, make_loader())
    spent = module.privacy_spent()
    assert spent.n_steps == 8
    assert (spent.epsilon > 1e15) if sigma < 1 else spent.epsilon == 0


@both
def test_numbers_of_numpy_leave_a_checkpoint_that_loads(make_plan, tmp_path):
    """As float64 is a float; saved as it is, it would need pickle to come back."""
    numbers = {name: np.float64(1.0) for name in ("clipping_norm", "noise_multiplier")}
    module = Net(make_plan(**numbers, target_delta=np.float64(1e-5)))
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    make_trainer(tmp_path, callbacks=[saves]).fit(module, make_loader())
    torch.load(saves.best_model_path, weights_only=True)
    resumed = Net(make_plan())
    make_trainer(tmp_path).fit(resumed, make_loader(), ckpt_path=saves.best_model_path)
    assert resumed.privacy_spent().n_steps == 8


@pytest.mark.parametrize(
    "value",
    [np.float32(1), np.int64(1), torch.tensor(1.0), "1", True, math.nan, 1j, [1.0]],
    ids=repr,
)
@pytest.mark.parametrize("field", ["clipping_norm", "noise_multiplier", "target_delta"])
def test_what_is_no_number_is_refused_by_name(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        DPSGD(**{"clipping_norm": 1.0, "noise_multiplier": 1.0, field: value})


def test_boxed_numbers_are_told_how_to_come_out():
    with pytest.raises(TypeError, match=r"np\.float32\(1\.0\).*\.item\(\)"):
        DPSGD(clipping_norm=1.0, noise_multiplier=np.float32(1))


@pytest.mark.parametrize("rate", [math.nan, -1.0, "0.1", torch.tensor(0.1)], ids=repr)
@both
def test_a_learning_rate_is_looked_at_before_its_step_is_spent(make_plan, rate, tmp_path):
    def schedule(step):
        return rate if step >= 3 else 0.05

    module = Net(make_plan(), optimizer=lambda: adamw(lr=schedule))
    with pytest.raises((TypeError, ValueError), match="the learning rate at step 3 must be"):
        make_trainer(tmp_path).fit(module, make_loader())
    assert module.privacy_spent().n_steps == module._dp.state.optimizer["step"] == 3


# -- what is counted as one ----------------------------------------------------------------------


def test_two_identical_views_of_an_example_train_like_one(tmp_path):
    """Views are averaged inside the loss: one example is still one unit, and costs the same."""

    class TwoViews(Net):
        def per_example_loss(self, batch):
            x, y, *_ = batch
            first = super().per_example_loss((x, y))
            second = super().per_example_loss((x.clone(), y))
            return torch.stack([first, second], 1).mean(1)

    one, two = Net(), TwoViews()
    for module in (one, two):
        make_trainer(tmp_path).fit(module, make_loader())
    assert one.privacy_spent() == two.privacy_spent()
    for got, want in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_one_record_more_changes_the_draws_and_not_the_divisor(tmp_path):
    """The update's scale is a public choice: noise on the mean is σC / batch_size for both."""
    stddevs = []
    for n in (24, 25):
        module = Net()
        make_trainer(tmp_path, max_epochs=1).fit(module, make_loader(Points(n)))
        stddevs.append(module._dp.mechanism.noise_stddev)
    assert stddevs == [1 / 6, 1 / 6]


def test_an_overflow_skips_nothing_and_counters_advance_together(tmp_path):
    """In mixed precision, too: a step that is skipped because of data would be a release."""

    class Overflows(Net):
        def per_example_loss(self, batch):
            return super().per_example_loss(batch) * 1e38 * 1e38

    rate = linear_schedule(0.8, 0.0, transition_steps=8)
    module = Overflows(optimizer=lambda: adamw(lr=rate))
    trainer = make_trainer(tmp_path, precision="bf16-mixed", max_steps=5)
    trainer.fit(module, make_loader())
    run = module._dp
    assert trainer.global_step == run.record.n_steps == run.state.noise.step == 5
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3)
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert run.state.clip.nonfinite_examples > 0
