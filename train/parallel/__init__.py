"""Process groups, the device mesh, and the flat buffers that ZeRO-1 shards."""
