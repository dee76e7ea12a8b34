"""How a key would look if it were written somewhere."""

from __future__ import annotations

import base64

from opake_lightning.random import RngKey


def forms(key: RngKey) -> list[bytes]:
    """Every way to write ``key`` that something is likely to use, as bytes to search for."""
    big, little = (key.bits.to_bytes(16, order) for order in ("big", "little"))
    found = [big, little, str(key.bits).encode(), str(list(big)).encode()]
    for raw in (big, little):
        found += [raw.hex().encode(), raw.hex().upper().encode(), repr(raw)[2:-1].encode()]
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            # Within something longer, at each of three alignments: what the neighbours cannot
            # change.
            for before in range(3):
                text = encode(bytes(before) + raw)
                found.append(text[-(-before * 4 // 3) : -(-(before + 16) * 4 // 3) - 1])
    halves = [key.bits >> 64, key.bits & ((1 << 64) - 1)]
    # numpy and yaml write a key in two words.
    return [*found, *(str(half).encode() for half in halves)]
