"""The vLLM mount: a platform for host-tensor backends, attention backends by name, MoE and DSA through the op table."""
