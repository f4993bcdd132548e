"""Triton kernels for any chip with a Triton compiler: the portable tier that backends may offer as it is."""
