"""The plugin's version, where every package can read it."""

from __future__ import annotations

__version__ = "0.1.0"
