"""The operations' Triton kernels: a module each, imported only when its kernel runs, so Triton stays optional."""
