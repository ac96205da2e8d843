"""What ``certify`` runs on each rank: a small training script, and what watches any script."""
