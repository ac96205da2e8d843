"""What a rank does with a toy: it leaves the project's own modules and takes those of the copy."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any


def in_copy(root: str, target: str, kwargs: dict[str, Any]) -> Any:
    """Call a function of a copy, in a process that has imported the project's and that ends with the job."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vtp_plugin", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, root)
    module, _, function = target.partition(":")
    found = getattr(importlib.import_module(module), function)(**kwargs)
    import vtp_plugin

    assert Path(vtp_plugin.__file__).is_relative_to(root)
    return found


def train(case: Any, options: dict[str, Any], trainer: Any = None) -> tuple[Any, str]:
    """Train a case on this rank; return what it saw, and what the plugin said."""
    from tests.multiproc.jobs import core_job
    from tests.support.pool import init_gloo

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vtp_plugin")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # it has a handler, so the plugin leaves its level as it is
    init_gloo()
    with core_job.applied(case, force=False, **options), core_job.model_parallel(case):
        found = (trainer or core_job.Trainer)(case)
        try:
            return found.run(), "\n".join(said)
        finally:
            found.close()


def train_with_0_20(case: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """Train a case on this rank with a Megatron that says it were of version 0.20."""
    from vtp_plugin.host.versions import find

    read = find._read_version
    find._read_version = lambda file: "0.20.0" if file.name == "package_info.py" else read(file)
    assert find.find_host()[0].name == "0.20"
    return train(case, options)
