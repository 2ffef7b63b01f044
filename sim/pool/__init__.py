"""Our own engine: vLLM 0.33's scheduler over a token-exact index, without blocks or a budget."""
