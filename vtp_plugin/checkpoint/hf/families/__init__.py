"""One file for each family; how to add one: docs/development/extending.md."""
