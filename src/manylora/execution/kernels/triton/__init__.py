"""GPU kernels in Triton; interpreted on the CPU in tests."""
