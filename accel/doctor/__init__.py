"""What this machine has, why something is not usable, and what contradicts itself."""
