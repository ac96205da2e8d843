"""The only code that imports Megatron; its files mirror Megatron's module paths.

The folder lies at the top of the repository, so that its listing shows at a glance what of Megatron is touched, and is
imported as ``vtp_plugin.patches`` through the symlink ``vtp_plugin/patches``.
"""
