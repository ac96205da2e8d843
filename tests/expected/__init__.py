"""What must come out, worked out without the plugin: from first principles, or by parts of Megatron."""
