"""How loops for the CPU are compiled and cached."""
