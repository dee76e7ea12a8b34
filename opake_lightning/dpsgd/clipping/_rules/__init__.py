"""What single examples' gradients are, operation by operation: one file a family of functions.

A rule is called outside of vmap, in place of a torch function that got a parameter together with
tensors of examples, which come with the examples in their first dimension. It runs the function
with parameters detached, and records how the examples' gradients come from that of the output. In
formulas ``dy`` is that gradient. What a rule does not cover it declines by ``NoRule``.
"""

from __future__ import annotations

from opake_lightning.dpsgd.clipping._rules import _attention as _attention
from opake_lightning.dpsgd.clipping._rules import _conv as _conv
from opake_lightning.dpsgd.clipping._rules import _elementwise as _elementwise
from opake_lightning.dpsgd.clipping._rules import _norms as _norms
from opake_lightning.dpsgd.clipping._rules import _products as _products
from opake_lightning.dpsgd.clipping._rules import _recurrent as _recurrent
from opake_lightning.dpsgd.clipping._rules import _tables as _tables

__all__: list[str] = []
