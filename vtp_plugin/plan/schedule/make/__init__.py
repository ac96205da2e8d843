"""How are orders made? By fixed rules (1F1B, interleaved), by search (the U-shape), and which one a step runs."""
