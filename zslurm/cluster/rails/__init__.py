"""Which GPU of every node uses which NIC."""
