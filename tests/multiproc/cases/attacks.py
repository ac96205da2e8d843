"""What attacks from the other site have in common; no Megatron, so that tests import it for nothing."""

from __future__ import annotations

MARKER = "marker"
"""A file in the attacker's folder: whoever runs what an attacker sends writes the number of its rank there."""
LONG_BYTES = 64 << 20
"""More than any object that crosses, and little enough that a test can let a rank take it."""
ESCAPES = "\x1b]0;owned\x07\x1b[2J"
ATTACKER = 1
