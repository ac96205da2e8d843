"""Runs that lose cards, ranks or their launcher."""
