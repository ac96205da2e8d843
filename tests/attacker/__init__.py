"""An attacker: for each place of the plugin that reads bytes of another site, inputs that are generated, and tried.

``entries.py`` lists the places, ``inputs.py`` makes the inputs, ``play.py`` tries them in processes of their own, and
``at_the_port.py`` talks to the port of a run that starts. One input again, as a failing test prints it:

    python -m tests.attacker.play --only "a verdict of a check" --first 137 --number 1
"""
