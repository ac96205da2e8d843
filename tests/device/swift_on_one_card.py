"""ms-swift's `megatron pt` with the real Transformer Engine, all ranks on one GPU: `1,2` beside `1,1`, in bf16.

    python tests/device/swift_on_one_card.py FOLDER

Written without a GPU: it has never run. It needs what `make env HOST=swift` installs, Transformer Engine, and NCCL 2.30
or later; start NVIDIA's MPS first (see `tests/support/devices.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # it is started as a script
from tests.support.devices import SHARED, sharing
from tests.swift.runs import Done, Run
from tests.swift.small_model import write_models

BF16 = {"torch_dtype": "bfloat16", "bf16": "true", "attention_backend": "auto", "ddp_backend": None, "lr": "1e-3"}
write_models(folder := Path(sys.argv[1]).resolve())
losses = []
for sizes in ((1, 1), (1, 2)):
    run = Run(name="-".join(map(str, sizes)), sizes=sizes, words=BF16)
    words, _ = sharing(sum(sizes), 1)
    script = Path(str(find_spec("swift").origin)).parent / "cli" / "_megatron" / "pt.py"
    flags = f"--vtp-size-list {','.join(map(str, sizes))} --vtp-device cuda"
    subprocess.run(
        [*(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={sum(sizes)}"), *words, script]
        + run.argv(folder, folder),
        env={**os.environ, **SHARED, "PYTHONPATH": str(ROOT), "VTP_FLAGS": flags, "TORCHDYNAMO_DISABLE": "1"},
        check=True,
    )
    losses.append(Done([0], folder / run.name).logged())
differ = max(abs(one / two - 1) for one, two in zip(*losses, strict=True))
print(f"{losses}: they differ by {differ:.1e}")
sys.exit(differ > 0.01)  # in bf16
