"""SGLang engines: two pools, a radix tree that keeps KV and states, prefill before decode."""
