"""Pure: faults and history become a decision."""
