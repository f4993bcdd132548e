"""Real vLLM on small models, tokens compared with transformers'; every engine runs in a process of its own."""
