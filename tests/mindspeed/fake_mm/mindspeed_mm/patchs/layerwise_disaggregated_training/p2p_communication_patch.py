"""As MindSpeed-MM's module: one name that the plugin has, too, and one that only this module has."""

from __future__ import annotations

vtp_send_forward = "theirs"
Shape = "theirs"
