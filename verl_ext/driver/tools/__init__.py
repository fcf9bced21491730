"""Tools that agents call, on verl's interface: what a trajectory does to its world lives and dies with it."""
