"""Plans that other planners gave for clusters of A100-40 and V100-16 cards.

Found on a CPU by running the planners of Sailor's artifact (github.com/eth-easl/sailor, cf2c8e3) as its experiment with
two kinds of cards does (`ae_scripts/planner/run_het.sh`: OPT-350M, nodes of four cards): the first plan of each that
Sailor's simulator says fits. Metis stops by itself after 300 s, here on a machine that did other things, too. It calls
two cards of a node that share layers two nodes; here they are `tp 2`.
"""

from __future__ import annotations

from typing import NamedTuple


class Quoted(NamedTuple):
    """A plan, whose it is, for how many cards of each kind, and the seconds of the processor it took there."""

    counts: tuple[int, int]
    planner: str
    seconds: float
    plan: str


CLUSTERS = ((8, 8), (16, 16), (16, 48), (32, 96))
QUOTED = (
    Quoted((8, 8), "Sailor", 0.0, "mbs 2: 26 on 8 A100-40 + 2 V100-16 tp 4"),
    Quoted((8, 8), "Metis", 35.7, "mbs 2: 20 on 8 A100-40 > 6 on 8 V100-16"),
    Quoted((8, 8), "AMP", 0.7, "mbs 1: 13 on 8 A100-40 > 13 on 8 V100-16"),
    Quoted(
        (8, 8),
        "FlashFlex",
        0.0,
        "mbs 1: 6,5 on 1 A100-40 > 1,1 on 1 V100-16 > 5,5 on 1 A100-40 > 1,2 on 1 V100-16 & 6,5 on 1 "
        "A100-40 > 1,1 on 1 V100-16 > 5,5 on 1 A100-40 > 1,2 on 1 V100-16",
    ),
    Quoted((16, 16), "Sailor", 0.1, "mbs 4: 13 on 6 A100-40 + 4 V100-16 tp 4 > 13 on 10 A100-40"),
    Quoted((16, 16), "Metis", 75.5, "mbs 2: 6,5,5,5 on 4 A100-40 > 5 on 8 V100-16 tp 2"),
    Quoted((16, 16), "AMP", 1.2, "mbs 1: 13 on 16 A100-40 > 13 on 16 V100-16"),
    Quoted(
        (16, 16),
        "FlashFlex",
        0.1,
        "mbs 1: 6,5 on 1 A100-40 > 2,2,2,2,2,2,3 on 1 V100-16 & 6,6,5,6 on 1 A100-40 > 3 on 1 V100-16 & "
        "6,6,5,6 on 1 A100-40 > 3 on 1 V100-16 & 7,5,5 on 1 A100-40 > 2,2,2,3 on 1 V100-16 & 7,6,6 on 1 "
        "A100-40 > 2,2,3 on 1 V100-16",
    ),
    Quoted((16, 48), "Sailor", 0.1, "mbs 2: 13 on 2 A100-40 + 12 V100-16 tp 4 > 13 on 14 A100-40"),
    Quoted((16, 48), "Metis", 45.6, "mbs 2: 5 on 16 V100-16 > 8 on 32 V100-16 > 13 on 16 A100-40"),
    Quoted((16, 48), "AMP", 2.5, "mbs 1: 13 on 16 A100-40 + 16 V100-16 > 13 on 32 V100-16"),
    Quoted(
        (16, 48),
        "FlashFlex",
        0.0,
        "mbs 1: 3,2,2,2,2,2,3,3,3,4 on 1 V100-16 & 3,2,2,2,2,2,3,3,3,4 on 1 V100-16 & 4,3,3,3,3,3,3,4 on "
        "1 V100-16 & 4,3,3,3,3,3,3,4 on 1 V100-16 & 6 on 1 A100-40 > 2 on 1 V100-16 > 5,5,5 on 1 A100-40 "
        "> 3 on 1 V100-16 & 6,5,5,5 on 1 A100-40 > 1,1,1,2 on 1 V100-16 & 6,5,5,5 on 1 A100-40 > 1,1,1,2 "
        "on 1 V100-16 & 6,5,5,5 on 1 A100-40 > 2,3 on 1 V100-16",
    ),
    Quoted((32, 96), "Sailor", 0.7, "mbs 2: 13 on 3 A100-40 + 24 V100-16 tp 4 > 13 on 27 A100-40"),
    Quoted((32, 96), "Metis", 73.4, "mbs 2: 8,7 on 16 A100-40 > 4 on 32 V100-16 > 7 on 32 V100-16 tp 2"),
    Quoted((32, 96), "AMP", 3.6, "mbs 1: 13 on 32 A100-40 + 32 V100-16 > 13 on 64 V100-16"),
    Quoted(
        (32, 96),
        "FlashFlex",
        0.0,
        "mbs 1: 10 on 1 A100-40 > 3,3,3,3,4 on 1 V100-16 & 3,2,2,2,2,2,3,3,3,4 on 1 V100-16 & "
        "4,3,3,3,4,4,5 on 1 V100-16 & 4,3,3,3,4,4,5 on 1 V100-16 & 4,3,3,3,4,4,5 on 1 V100-16 & "
        "5,4,4,4,4,5 on 1 V100-16 & 5,4,4,4,4,5 on 1 V100-16 & 5,4,4,4,4,5 on 1 V100-16 & 5,4,4,4,4,5 on "
        "1 V100-16 & 5,4,4,4,4,5 on 1 V100-16 & 5,4,4,4,4,5 on 1 V100-16 & 5,4,4,4,4,5 on 1 V100-16 & "
        "5,4,4,4,4,5 on 1 V100-16 & 7,6,6,7 on 1 A100-40 & 7,6,6,7 on 1 A100-40 & 8,6,7 on 1 A100-40 > "
        "2,3 on 1 V100-16 & 8,6,7 on 1 A100-40 > 2,3 on 1 V100-16 & 8,7 on 1 A100-40 > 2,2,3,4 on 1 "
        "V100-16 & 8,7,8 on 1 A100-40 > 3 on 1 V100-16 & 8,7,8 on 1 A100-40 > 3 on 1 V100-16 & 8,7,8 on 1"
        " A100-40 > 3 on 1 V100-16 & 8,7,8 on 1 A100-40 > 3 on 1 V100-16 & 9,8,9 on 1 A100-40",
    ),
)
