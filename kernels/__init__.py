"""How one operation computes: torch references and Triton kernels."""
