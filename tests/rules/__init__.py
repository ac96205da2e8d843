"""Rules for sources and documents of this repository, as functions on text: `tests/house` holds them."""
