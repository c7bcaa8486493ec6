"""What runs in the zygotes, agents and ranks. Only here is torch imported as a module is loaded."""
