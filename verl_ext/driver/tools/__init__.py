"""Tools for agents, on verl's interface. Each trajectory has a private shell or database, which
ends with the trajectory.
"""
