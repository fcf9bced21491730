"""Tools for agents, on verl's interface. Each trajectory has its own shell or database, which ends with it."""
