"""Add the installed Megatron to patches/pins.json: digests of the sources that the patches were written against.

Run it once the patches were read against a version, and its tests pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Write the file anew; other versions keep their pins."""
    from scripts.make_docs import record_sections
    from vtp_plugin.hosts import find_host
    from vtp_plugin.patches.registry import PINS
    from vtp_plugin.patching.pins import pins_of, read_pins

    host_version = find_host()[1].version
    records = [record for section in record_sections().values() for record in section if record.fits(host_version)]
    pins = {**(read_pins(PINS) if PINS.exists() else {}), host_version: pins_of(record.target for record in records)}
    PINS.write_text(json.dumps(pins, indent=1, sort_keys=True) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
