"""Who is where. Pure: no torch, no Megatron, no global state.

Each module answers one question: ``sizes`` (is a list of sizes possible), ``pipeline`` (which rank belongs to which
stage), ``replicas`` (which replicas of two stages work together), ``groups`` (which process groups does Megatron make
of it), ``u_layers`` (which layers does a stage of a U hold), ``grid`` (which ranks differ along which dimension, for
the bridges between modules).
"""
