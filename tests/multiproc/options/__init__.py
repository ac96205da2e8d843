"""Options of Megatron and of the plugin, and what is refused."""
