"""What a run takes and leaves: time, memory, processes, traces, and what was predicted of them."""
