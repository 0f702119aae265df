"""Decoders with recurrent states, alone or beside attention, a file a family."""
