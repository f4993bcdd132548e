"""NVIDIA GPUs: CUDA C++ compiled at run time for the gather family, Triton and importable kernels for the rest."""
