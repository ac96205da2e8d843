"""Errors of the plugin.

A :class:`VtpError` is meant for a person: its text is one line that names the value, the rule and the way out, and the
plugin's exception hook prints it without a stack trace. Broken internal invariants are plain ``assert`` statements.
"""

from __future__ import annotations


class VtpError(Exception):
    """Base of every error that a user of the plugin may see."""


class ConfigError(VtpError, ValueError):
    """What the user asked for cannot work: a value breaks a rule that the message states."""


class PatchError(VtpError, RuntimeError):
    """A patch does not fit the Megatron that is installed, or its state does not allow the request."""


class PeerError(VtpError, RuntimeError):
    """Another rank failed, disagrees or does not answer."""
