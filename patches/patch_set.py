"""The moments at which records apply; each is called as the documents call it."""

from __future__ import annotations

from vtp_plugin.util.text import TextEnum


class Moment(TextEnum):
    """When a record applies, together with all others of that moment."""

    COMMAND_LINE = "Always: the command line, and a name that scripts import"
    PLATFORM = "With a list of sizes, or on the CPU platform"
    CPU = "On the CPU platform"
    STAGES = "With a list of sizes, or with `--vtp-bridges`"
    LIST = "With a list of sizes"
    SPLIT = "With `--vtp-split-backward`"
    LORA = "With `--vtp-lora-rank`"
    BRIDGES = "With `--vtp-bridges`"
    U_SHAPE = "With `--layerwise-disaggregated-training`"
    SITES = "With two sites in `--vtp-sites`"
    SWIFT = "In ms-swift's Megatron, with a list of sizes"
    MM_RINGS = "In a U of MindSpeed-MM with vision layers in the cloud"
