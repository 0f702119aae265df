"""Models that read pictures: their processors and towers, which are transformers' own."""
