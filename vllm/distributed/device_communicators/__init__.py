"""Collectives of one kind of device, under upstream's names."""
