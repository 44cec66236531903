"""CPU kernels compiled by numba, on the OpenMP threads of torch."""
