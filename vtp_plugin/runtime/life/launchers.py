"""How to start a run that goes on after losses: a command to paste for each launcher, as in docs/lost-cards.md."""

from __future__ import annotations

from collections.abc import Mapping

SHARE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With the value 1 torchrun gives ranks a store of their own, which one of them keeps."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "static torchrun, on each machine": (
        "torchrun --nnodes 3 --node-rank $NODE --nproc-per-node 8 --master-addr $FIRST --master-port 29500 \\",
        "    --max-restarts 100 run ...",
    ),
    "one machine, in a loop of the shell": (
        "until torchrun --standalone --nproc-per-node 8 --max-restarts 3 run ...; do",
        "    [ -e CHECKPOINTS/vtp_stopped.txt ] && break",
        "    sleep 10",
        "done",
    ),
    "Slurm": (
        "#SBATCH --nodes=3 --ntasks-per-node=1 --requeue --open-mode=append",
        "[ -e CHECKPOINTS/vtp_stopped.txt ] && exit 0",
        'export FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "srun bash -c 'torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --nproc-per-node 8 \\",
        "    --master-addr $FIRST --master-port 29500 --max-restarts 100 run ...' || scontrol requeue $SLURM_JOB_ID",
    ),
    "elastic torchrun, first on a machine that trains nothing": (
        "python -c \"from torch.distributed import TCPStore as S; import time; S('0.0.0.0', 29400, is_master=True, "
        'wait_for_workers=False); time.sleep(1e9)"',
    ),
    "elastic torchrun, then on each machine that trains": (
        f"export {SHARE_VARIABLE}=1",
        "torchrun --nnodes 2:3 --nproc-per-node 8 --max-restarts 100 --rdzv-backend c10d \\",
        "    --rdzv-endpoint $KEEPER:29400 --rdzv-id run1 --rdzv-conf is_host=0 run ...",
    ),
}
"""By launcher, the lines of its command; ``run ...`` stands for ``-m vtp_plugin run SCRIPT FLAGS``."""


def describe_launchers(environment: Mapping[str, str]) -> list[str]:
    """Give the commands as lines, with what the variables of this process mean for them.

    >>> lines = describe_launchers({})
    >>> lines[0]
    'run ... stands for -m vtp_plugin run SCRIPT FLAGS --vtp-size-list auto --vtp-stages MIN:MAX'
    >>> lines[-1]
    'TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1 here: elastic torchrun ends all when it loses the first machine'
    """
    is_set = environment.get(SHARE_VARIABLE) == "1"
    what = (
        "1 here, as elastic torchrun needs it"
        if is_set
        else ("not 1 here: elastic torchrun ends all when it loses the first machine")
    )
    return [
        "run ... stands for -m vtp_plugin run SCRIPT FLAGS --vtp-size-list auto --vtp-stages MIN:MAX",
        *(line for name, command in COMMANDS.items() for line in (f"{name}:", *(f"    {part}" for part in command))),
        f"{SHARE_VARIABLE} is {what}",
    ]
