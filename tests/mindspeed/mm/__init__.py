"""Stand-ins with which the unmodified training script of MindSpeed-MM runs on CPUs, and made samples for it."""
