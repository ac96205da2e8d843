"""ms-swift's Megatron (`megatron sft`, `megatron pt`): what it takes for the size of all stages is each stage's own."""
