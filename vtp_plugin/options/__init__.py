"""The command line: the plugin's flags, and Megatron's options against the stage sizes.

``flags`` declares the plugin's flags, and ``derived`` says what follows from them. ``table`` says which of Megatron's
options work, and ``checks`` whether the values of those that work fit every stage.

A check is a function that returns one line, ``value; rule; way out``, for everything that does not fit, and nothing if
all does. The caller joins the lines of its checks and gives them to :func:`vtp_plugin.errors.refuse`, which raises one
error for all. What can be told from an option's value alone is a row of the table, with the condition under which it is
refused (``table.rule.Verdict``); ``docs/megatron-options.md`` shows all rows. What has to be computed, such as sizes
that must divide, is a function in ``checks``.

``check_options`` and ``check_sizes`` read Megatron's arguments as its parser returns them, before ``validate_args`` has
run: every rank then sees the same values and reports the same lines. Nothing here needs torch or Megatron.
"""
