"""Checkpoints: saved, loaded into other lists, written again, damaged, and from Hugging Face."""
