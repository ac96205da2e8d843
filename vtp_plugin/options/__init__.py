"""The command line: the plugin's flags, and Megatron's options against the stage sizes.

``flags`` declares the plugin's flags, and ``derived`` says what follows from them. ``table`` says which of Megatron's
options work, and ``checks`` whether the values of those that work fit every stage.
``check_options`` and ``check_sizes`` read Megatron's arguments as its parser returns them, before ``validate_args`` has
run: every rank then sees the same values and reports the same lines. Nothing here needs torch or Megatron.
"""
