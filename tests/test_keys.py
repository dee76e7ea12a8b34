"""Keys that are kept apart: in files and in the environment, and what a plan makes of them."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from opake_lightning import DPFTRL, DPSGD, PrivacyError
from opake_lightning.accounting import Ledger
from opake_lightning.dpftrl.noise import (
    band_mf_strategy,
    bisr_strategy,
    blt_strategy,
    bsr_strategy,
    identity_strategy,
    lambda_cgd_strategy,
)
from opake_lightning.optimizers import sgd
from opake_lightning.random import (
    RngKey,
    fold_in,
    fresh_key,
    key,
    key_from_environment,
    key_from_file,
    write_key_file,
)
from opake_lightning.serialization import from_state_dict, key_paths, state_dict
from tests.trainer.key_forms import forms

DIGITS = "0123456789abcdef0123456789ABCDEF"


def holding(tmp_path, content, mode=0o600):
    path = tmp_path / "run.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


# -- files ----------------------------------------------------------------------------------------


def test_a_key_file_is_for_its_owner_alone_and_reads_back(tmp_path):
    before = os.umask(0)  # whatever the process lets others do
    try:
        write_key_file(tmp_path / "run.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600
    assert key_from_file(tmp_path / "run.key") == key_from_file(str(tmp_path / "run.key"))


def test_every_key_file_has_another_key(tmp_path):
    for name in "ab":
        write_key_file(tmp_path / name)
    assert key_from_file(tmp_path / "a") != key_from_file(tmp_path / "b")


def test_a_key_is_never_overwritten(tmp_path):
    write_key_file(tmp_path / "run.key")
    first = key_from_file(tmp_path / "run.key")
    with pytest.raises(FileExistsError):
        write_key_file(tmp_path / "run.key")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_key_file(tmp_path / "link")
    assert key_from_file(tmp_path / "run.key") == first


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o610])
def test_a_file_that_others_can_reach_is_refused(tmp_path, mode):
    path = holding(tmp_path, DIGITS.encode(), mode)
    with pytest.raises(PrivacyError, match=f"mode {mode:04o}.*chmod 600") as refused:
        key_from_file(path)
    assert DIGITS not in str(refused.value)
    path.chmod(0o400)
    assert key_from_file(path) == RngKey(int(DIGITS, 16))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        DIGITS[1:].encode(),
        f"{DIGITS}0".encode(),
        f"0x{DIGITS[2:]}".encode(),
        f"+{DIGITS[1:]}".encode(),  # int(..., 16) takes these, and would lose bits
        f"{DIGITS[:15]}_{DIGITS[16:]}".encode(),
        f"{DIGITS} {DIGITS}".encode(),
        DIGITS.encode("utf-16"),
        b"\xff" * 32,
        "٣".encode() * 16,
        DIGITS.encode() * 100,
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path, monkeypatch, content):
    path = holding(tmp_path, content)
    with pytest.raises(ValueError, match=r"run\.key holds no key") as refused:
        key_from_file(path)
    told = f"{refused.value!r} {refused.value.__cause__} {refused.value.__suppress_context__}"
    assert told.endswith("None True")
    for piece in (DIGITS[2:14], DIGITS[16:]):
        assert piece not in told
    if b"\0" not in content:
        monkeypatch.setenv("RUN_KEY", os.fsdecode(content))
        with pytest.raises(ValueError, match="RUN_KEY holds no key") as refused:
            key_from_environment("RUN_KEY")
        assert DIGITS[16:] not in str(refused.value)


def test_a_missing_file_is_an_error_not_a_new_key(tmp_path):
    with pytest.raises(FileNotFoundError):
        key_from_file(tmp_path / "none")


# -- environment ----------------------------------------------------------------------------------


def test_a_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("RUN_KEY", f" {DIGITS}\n")
    assert key_from_environment("RUN_KEY") == RngKey(int(DIGITS, 16))


def test_a_missing_variable_is_an_error_not_a_new_key(monkeypatch):
    monkeypatch.delenv("RUN_KEY", raising=False)
    with pytest.raises(PrivacyError, match="RUN_KEY is not set"):
        key_from_environment("RUN_KEY")


# -- digests and states ---------------------------------------------------------------------------


def test_a_digest_tells_keys_apart_and_is_no_key_that_is_used():
    rng = fresh_key()
    assert rng.digest() == RngKey(rng.bits).digest()
    assert len({rng.hex(), rng.digest(), RngKey(rng.bits ^ 1).digest()}) == 3
    for word in ("gaussian_noise", "mf_gaussian", "forward", "poisson", "split", 0):
        assert fold_in(rng, word).hex() != rng.digest()
    # Checkpoints name words to fold in, and who changes one may name any.
    for word in ("fingerprint", "digest", "compare", ""):
        assert fold_in(rng, word).hex() != rng.digest()


@pytest.mark.parametrize(
    "take",
    [
        lambda given: DPSGD(clipping_norm=1.0, noise_multiplier=1.0, key=given),
        lambda given: dpftrl(identity_strategy(), key=given),
        lambda given: fold_in(given, 1),
        lambda given: RngKey(given),
        lambda given: RngKey(-int(given, 16)),
        lambda given: RngKey(int(given, 16) << 8),
        lambda given: RngKey.from_hex(f"{given}0"),
    ],
)
def test_a_key_in_another_form_is_refused_and_not_repeated(take):
    with pytest.raises((TypeError, ValueError), match=r"key|RngKey") as refused:
        take(DIGITS)
    told = str(refused.value).lower()
    assert not any(form.decode("latin-1") in told for form in forms(RngKey.from_hex(DIGITS)))


def test_a_state_can_be_saved_without_its_keys():
    state = {"noise": (key(7), 3), "clip": {"key": key(8), "norm": 1.0}}
    assert key_paths(state) == ["clip/key", "noise/0"]
    flat = state_dict(state, keys=False)
    assert flat == {"noise/1": 3, "clip/norm": 1.0}
    found = {"noise/0": key(7).hex(), "clip/key": key(8).hex()}
    assert from_state_dict(state, {**flat, **found}) == state


# -- plans ----------------------------------------------------------------------------------------


def dpftrl(strategy, **changes):
    defaults = {"clipping_norm": 1.0, "noise_multiplier": 1.0, "key": key(7)}
    return DPFTRL(strategy=strategy, **{**defaults, "key_in_checkpoint": False, **changes})


def test_a_key_that_no_checkpoint_holds_must_be_named():
    with pytest.raises(PrivacyError, match=r"key_in_checkpoint=False needs a key.*key_from_file"):
        DPSGD(clipping_norm=1.0, noise_multiplier=1.0, key_in_checkpoint=False)
    with pytest.raises(PrivacyError, match="needs a key"):
        dpftrl(identity_strategy(), key=None)


@pytest.mark.parametrize("wrong", [0, None, "no"])
def test_the_option_is_a_boolean(wrong):
    with pytest.raises(TypeError, match=r"key_in_checkpoint must be True or False, got"):
        DPSGD(clipping_norm=1.0, noise_multiplier=1.0, key=key(7), key_in_checkpoint=wrong)


@pytest.mark.parametrize(
    "strategy", [band_mf_strategy(3), bsr_strategy(2), blt_strategy(2)], ids=lambda s: s.name
)
def test_noise_that_a_checkpoint_must_hold_is_refused_by_name(strategy):
    refused = rf"{strategy.name}\(.*can subtract it.*lambda_cgd_strategy, bisr_strategy, identity"
    with pytest.raises(PrivacyError, match=refused):
        dpftrl(strategy)
    with pytest.raises(PrivacyError, match=refused):
        dpftrl(identity_strategy(), second_moment_strategy=strategy, sampling="fixed_partition")
    assert dpftrl(strategy, key_in_checkpoint=True)


@pytest.mark.parametrize(
    "strategy",
    [
        identity_strategy(),
        lambda_cgd_strategy(0.5),
        lambda_cgd_strategy(0.0),
        bisr_strategy(4),
        band_mf_strategy(1),
        bsr_strategy(1),
    ],
    ids=lambda s: s.describe(),
)
def test_noise_that_is_drawn_again_leaves_no_buffers(strategy):

    plan = dpftrl(strategy)
    mechanism = plan.resolve(n_examples=24, batch_size=6, planned_steps=8, spent=Ledger())
    step = mechanism.step(lambda params, batch: None, sgd(0.1), key(7), {"w": torch.zeros(3)})
    assert getattr(step.noise_state, "buffers", {}) == {}
