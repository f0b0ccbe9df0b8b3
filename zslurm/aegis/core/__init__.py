"""Pure: what the supervisor decides, from what is reported to it; without clock, files, processes or network."""
