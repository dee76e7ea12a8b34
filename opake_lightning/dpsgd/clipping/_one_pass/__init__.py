"""The one-pass engine: clipping at the price of ordinary training.

The loss of the whole batch runs once forward and once backward, without any weight's gradient:
only gradients of the outputs of operations that hold parameters. From these and the operations'
inputs come each example's norm, and then, with the factors known, the clipped sum as one product,
in place of the ordinary weight gradient. No second backward pass, no gradient per example kept.

It is exact where every use of a parameter has a rule, and says so where not. Whether the first
dimension really counts examples no recording can tell; :mod:`._verify` compares with single ones.
"""

from __future__ import annotations

from opake_lightning.dpsgd.clipping._one_pass import _conv as _conv
from opake_lightning.dpsgd.clipping._one_pass._clip import clipped_sum
from opake_lightning.dpsgd.clipping._one_pass._engine import Pass, run_pass
from opake_lightning.dpsgd.clipping._one_pass._rules import RULES, rule_for
from opake_lightning.dpsgd.clipping._one_pass._verify import Verified
from opake_lightning.dpsgd.clipping._uses import Unsupported

__all__ = ["RULES", "Pass", "Unsupported", "Verified", "clipped_sum", "rule_for", "run_pass"]
