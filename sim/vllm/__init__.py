"""vLLM's cache manager and scheduler, versions 0.33 and 0.28, block for block."""
