"""A fake of MindSpeed for tests: its patch manager, and features that touch what the plugin touches.

Written from how MindSpeed behaves (branch 26.1.0_core_r0.12.1); it holds none of its code.
"""
