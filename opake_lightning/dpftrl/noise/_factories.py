r"""The strategies to choose from.

Two workloads go by the name of momentum. For :func:`band_mf_strategy` and :func:`blt_strategy`,
``momentum`` is the decay of a velocity, :math:`\sum_s \beta^{t-s} g_s`, as an optimizer with a
moving average of gradients (Adam) sees them. For :func:`bsr_strategy` and :func:`bisr_strategy`
it is that of the sum of velocities, the iterates of SGD with momentum, because the closed forms
are roots of that matrix. A ``momentum`` that matches the optimizer's is not always the better
strategy: compare :meth:`StrategyMatrix.rmse` times the sensitivity.
"""

from __future__ import annotations

from opake_lightning import _check
from opake_lightning.dpftrl.noise._objective import ErrorKind
from opake_lightning.dpftrl.noise._strategies import (
    BandMf,
    Bisr,
    Blt,
    Bsr,
    Identity,
    LambdaCgd,
    Strategy,
)
from opake_lightning.dpftrl.noise._workload import Workload, prefix_workload, velocity_workload

__all__ = [
    "band_mf_strategy",
    "bisr_strategy",
    "blt_strategy",
    "bsr_strategy",
    "identity_strategy",
    "lambda_cgd_strategy",
]


def identity_strategy() -> Strategy:
    """Independent noise at every step: C is the identity, as in DP-SGD."""
    return Identity()


def band_mf_strategy(
    bands: int,
    momentum: float = 0.0,
    *,
    error: ErrorKind = "mean",
    workload: Workload | None = None,
) -> Strategy:
    r"""Banded Toeplitz matrix with the least error of all with that many bands.

    Each example may take part at most once in ``bands`` steps in a row; under a schema with a
    smaller separation the sensitivity is larger and the matrix not optimal. Columns have norm 1.

    Args:
        bands: Number of diagonals that are not zero, at least 1; 1 is independent noise.
        momentum: Short for ``workload=velocity_workload(momentum)``, Adam's first moment; 0 is
            prefix sums.
        error: Which error to minimise: its mean over steps, or that of the worst step.
        workload: What the noisy gradients are used for; by default prefix sums.

    Raises:
        ValueError: If ``bands`` is not at least 1, ``momentum`` not in [0, 1), ``error`` unknown,
            or both ``momentum`` and ``workload`` are given.

    Source: Choquette-Choo et al. 2023 (arXiv:2306.08153).

    >>> matrix = band_mf_strategy(bands=2).matrix(100)
    >>> matrix.coefficients.round(3), round(matrix.sensitivity(min_sep=25), 3)
    (array([0.796, 0.606]), 2.0)
    """
    return BandMf(_check.positive_int("bands", bands), _error(error), _workload(momentum, workload))


def blt_strategy(
    n_buffers: int = 3,
    momentum: float = 0.0,
    *,
    error: ErrorKind = "max",
    min_sep: int | None = None,
    max_participations: int | None = None,
    workload: Workload | None = None,
) -> Strategy:
    r"""Diagonals that are sums of ``n_buffers`` exponentials, optimised: near the optimum of all.

    The memory is that of ``n_buffers`` gradients. All buffers asked for are used; the last ones
    hardly gain anything, and more than five are not worth their memory.

    Args:
        n_buffers: Number of buffers, at least 1 and at most 10.
        momentum: Short for ``workload=velocity_workload(momentum)``, Adam's first moment; 0 is
            prefix sums.
        error: Which error to minimise: its mean over steps, or that of the worst step.
        min_sep: Schema to optimise for: least number of steps between participations. Left out,
            a plan fills in its own; ``mf_gaussian_noise`` does not, and the matrix is that
            optimised for one participation.
        max_participations: Most participations; by default as many as fit.
        workload: What the noisy gradients are used for; by default prefix sums.

    Raises:
        ValueError: If a number is out of range, ``error`` is unknown, both ``momentum`` and
            ``workload`` are given, or ``max_participations`` without ``min_sep``.

    Source: Dvijotham et al. 2024 (arXiv:2404.16706); McMahan et al. 2024 (arXiv:2408.08868).

    >>> matrix = blt_strategy(n_buffers=2).matrix(100)
    >>> round(matrix.max_column_norm() * matrix.rmse(prefix_workload()).max, 3)
    2.537
    """
    if min_sep is not None:
        _check.positive_int("min_sep", min_sep)
    if max_participations is not None:
        _check.positive_int("max_participations", max_participations)
        if min_sep is None:
            raise ValueError(
                f"max_participations={max_participations} needs min_sep, how many steps lie "
                "between participations; give both, or neither"
            )
    if _check.positive_int("n_buffers", n_buffers) > _MOST_BUFFERS:
        raise ValueError(
            f"n_buffers must be at most {_MOST_BUFFERS}, got {n_buffers}: the error does not "
            "change any more in double precision"
        )
    return Blt(n_buffers, _error(error), _workload(momentum, workload), min_sep, max_participations)


def bsr_strategy(
    bands: int, *, momentum: float = 0.0, decay: float = 1.0, normalized: bool = False
) -> Strategy:
    r"""Banded square root: the first ``bands`` diagonals of :math:`A^{1/2}`.

    .. math:: A_{t,s} = \sum_{i=0}^{t-s} \alpha^{t-s-i} \beta^i, \qquad
              c_j = \sum_{i=0}^{j} \alpha^{j-i} r_{j-i}\, \beta^i r_i, \qquad
              r_k = 4^{-k} \binom{2k}{k}

    Args:
        bands: Number of diagonals, at least 1.
        momentum: :math:`\beta` in [0, 1) of SGD with momentum.
        decay: :math:`\alpha` in (0, 1]: what weight decay leaves of the parameters at each step.
        normalized: Divide each column by its norm.

    Raises:
        ValueError: If an argument is out of range.

    Source: Kalinin & Lampert 2024 (arXiv:2405.13763), Theorem 1.

    >>> bsr_strategy(4).matrix(100).coefficients
    array([1.    , 0.5   , 0.375 , 0.3125])
    """
    return Bsr(_check.positive_int("bands", bands), *_decays(momentum, decay), bool(normalized))


def bisr_strategy(
    bandwidth: int, *, momentum: float = 0.0, decay: float = 1.0, normalized: bool = False
) -> Strategy:
    r"""Banded inverse square root: the first ``bandwidth`` diagonals of :math:`A^{-1/2}`.

    As :func:`bsr_strategy`, with :math:`\tilde r_k = r_k / (1 - 2k)` in place of :math:`r_k`, for
    the inverse of C. C itself is not banded, so that sampling does not amplify its privacy.

    Args:
        bandwidth: Number of diagonals of the inverse, at least 1.
        momentum: :math:`\beta` in [0, 1) of SGD with momentum.
        decay: :math:`\alpha` in (0, 1]: what weight decay leaves of the parameters at each step.
        normalized: Divide each column by its norm.

    Raises:
        ValueError: If an argument is out of range.

    Source: arXiv:2505.12128, Lemma 1.

    >>> bisr_strategy(4).matrix(100).inverse_coefficients()[:5]
    array([ 1.    , -0.5   , -0.125 , -0.0625,  0.    ])
    """
    width = _check.positive_int("bandwidth", bandwidth)
    return Bisr(width, *_decays(momentum, decay), bool(normalized))


def lambda_cgd_strategy(lam: float, *, normalized: bool = False) -> Strategy:
    r"""Noise of which the part ``lam`` of the step before is taken back: needs no memory.

    .. math:: C_{t,s} = \lambda^{t-s}, \qquad x_t = z_t - \lambda z_{t-1}

    The noise of the step before is drawn again from its key.

    Args:
        lam: :math:`\lambda` in [0, 1); 0 is independent noise.
        normalized: Divide each column by its norm.

    Raises:
        ValueError: If ``lam`` is not in [0, 1).

    Source: arXiv:2601.22334.

    >>> lambda_cgd_strategy(0.5).matrix(100).row_norms()[:3].round(3)
    array([1.   , 1.118, 1.118])
    """
    return LambdaCgd(_check.fraction("lam", lam, zero=True, one=False), bool(normalized))


_MOST_BUFFERS = 10


def _decays(momentum: float, decay: float) -> tuple[float, float]:
    return (
        _check.fraction("momentum", momentum, zero=True, one=False),
        _check.fraction("decay", decay, zero=False, one=True),
    )


def _error(error: str) -> ErrorKind:
    if error == "mean" or error == "max":
        return error
    raise ValueError(f'error must be "mean" or "max", got {error!r}')


def _workload(momentum: float, workload: Workload | None) -> Workload:
    _check.fraction("momentum", momentum, zero=True, one=False)
    if workload is None:
        return velocity_workload(momentum) if momentum else prefix_workload()
    if not isinstance(workload, Workload):
        raise TypeError(f"workload must be a Workload, got {workload!r}; try prefix_workload()")
    if momentum:
        raise ValueError(
            f"give momentum={momentum!r} or workload={workload.describe()}, not both: momentum is "
            "short for workload=velocity_workload(momentum)"
        )
    return workload
