"""The operations' Triton kernels: a module each, imported only when it runs, so Triton stays optional."""
