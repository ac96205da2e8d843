"""How to start a run that survives lost devices: a command for each launcher, as in docs/guides/lost-cards.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vtp_plugin.plan.launch.launch_commands import meeting_words, torchrun_words
from vtp_plugin.util.own_command import MODULE, own_command

SHARE_VARIABLE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With the value 1 torchrun gives ranks a store of their own, which one of them keeps."""
STATIC: Final = "static torchrun, on each machine"
LOOP: Final = "one machine, in a shell loop"
SLURM: Final = "Slurm"
KEEPER: Final = "elastic torchrun, first on a machine that trains nothing"
ELASTIC: Final = "elastic torchrun, then on each machine that trains"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    STATIC: (
        f"{torchrun_words('$NODES', '$NODE', '$DEVICES')} \\",
        f"    {meeting_words('$FIRST', '$PORT')} --max-restarts 100 run ...",
    ),
    LOOP: (
        "until torchrun --nproc-per-node $DEVICES --master-port $PORT --max-restarts 3 run ...; do",
        "    [ -e CHECKPOINTS/vtp_stopped.txt ] && break",
        "    sleep 10",
        "done",
    ),
    SLURM: (
        "#SBATCH --nodes=3 --ntasks-per-node=1 --requeue --open-mode=append",
        "[ -e CHECKPOINTS/vtp_stopped.txt ] && exit 0",
        "export DEVICES=8 PORT=29500",
        'export FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun bash -c '{torchrun_words('$SLURM_NNODES', '$SLURM_NODEID', '$DEVICES')} \\",
        f"    {meeting_words('$FIRST', '$PORT')} --max-restarts 100 run ...' || scontrol requeue $SLURM_JOB_ID",
    ),
    KEEPER: (f"{MODULE} rendezvous $KEEPER",),
    ELASTIC: (
        f"export {SHARE_VARIABLE}=1",
        "torchrun --nnodes 2:3 --nproc-per-node $DEVICES --max-restarts 100 --rdzv-backend c10d \\",
        "    --rdzv-endpoint $KEEPER --rdzv-id run1 --rdzv-conf is_host=0 run ...",
    ),
}
"""By launcher, the lines of its command; ``run ...`` stands for ``-m vtp_plugin run SCRIPT FLAGS``."""
PICKLE: Final = (
    "whoever reaches the port of a c10d rendezvous (--rdzv-backend c10d, --standalone) can run code on all machines of "
    "the run: torchrun keeps its state there as a pickle. Let it listen only on a network that is yours"
)
"""What a user of elastic torchrun must know."""
_NAMES = (
    "run ... stands for -m vtp_plugin run SCRIPT FLAGS --vtp-size-list auto --vtp-stages MIN:MAX",
    "$DEVICES: devices of a machine; $NODES: machines; $NODE: number of this one; $FIRST: address of the first one; "
    "$PORT: a port that is free there, such as 29500; $KEEPER: address and port of the rendezvous, as 10.8.0.1:29400",
)


def describe_launchers(environment: Mapping[str, str]) -> list[str]:
    """Return the commands as lines, with the effect that the variables of this process have on them.

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
        *_NAMES,
        *(
            line
            for name, command in COMMANDS.items()
            for line in (f"{name}:", *(f"    {part.replace(MODULE, own_command())}" for part in command))
        ),
        PICKLE,
        f"{SHARE_VARIABLE} is {what}",
    ]
