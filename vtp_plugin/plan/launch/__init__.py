"""How a layout is started: which node has which ranks, and the command of each node. Pure: no torch.

``launch_commands`` says which node has which ranks, and writes that for torchrun and for Slurm.

Words:
    node: one machine with its devices; it starts one process for each of its ranks.
    block: consecutive ranks of one node.
    agent: one torchrun on a node, which starts one block.
"""
