"""Events of the prefix cache, for routers and others that choose an engine by what it has."""
