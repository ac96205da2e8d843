"""As MindSpeed-MM's module: one name that the plugin has, too, and one that only this module has."""

from __future__ import annotations

get_vtp_size_list = "theirs"
vtp_allreduce = "theirs"
