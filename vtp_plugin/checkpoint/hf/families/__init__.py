"""One file for each family; how to add one: docs/hugging-face.md."""
