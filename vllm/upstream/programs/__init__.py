"""Programs that are started by `python -m` of a path of upstream's."""
