"""Pure: reports of agents and exits of ranks become faults."""
