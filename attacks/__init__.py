"""Score-based membership attacks, their statistics and their intervals."""
