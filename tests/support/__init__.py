"""What tests of all kinds use: the Megatron at hand, pools of ranks, models and files, lines that a process printed."""
