"""MindSpeed as a host: with a fake of its patch manager everywhere, and with MindSpeed itself where a path names it."""
