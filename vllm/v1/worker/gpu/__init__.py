"""The V2 model runner. It runs the CPU, too: the name is where readers of upstream look for it."""
