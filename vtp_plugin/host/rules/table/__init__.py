"""Which of Megatron's options work with stage sizes? A table with one row for each, and what it refuses and shows."""
