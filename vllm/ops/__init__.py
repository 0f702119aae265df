"""Operations: one file each, with its schema, its PyTorch reference and its faster implementations."""
