"""Megatron's options against the stage sizes: which of them work, and whether their values fit every stage.

``table`` says which of Megatron's options work, ``checks`` whether their values fit every stage, and ``run_checks``
asks both.

A check is a function that returns one line, ``value; rule; way out``, for each problem, and nothing if there is none.
The caller joins the lines of its checks and gives them to :func:`vtp_plugin.errors.refuse`, which raises one error for
all. If an option's value alone decides, the check is a row of the table, with the condition under which the option is
refused (``table.rule.Verdict``); ``docs/reference/megatron-options.md`` shows all rows. If something has to be
computed, such as sizes that must divide, the check is a function in ``checks``.

The checks read Megatron's arguments as its parser returns them, before ``validate_args`` has run: every rank then sees
the same values and reports the same lines. Nothing here needs torch or Megatron.

Words:
    option: one of Megatron's, or of MindSpeed's; a flag is what is written on the command line for it.
    row: what the table says of an option (``OptionRule``).
    verdict: supported, or under which condition refused (``Verdict``).
    context: what is known of the run besides Megatron's arguments (``OptionContext``).
    problem: one line that says why a run cannot be; checks return them.
"""
