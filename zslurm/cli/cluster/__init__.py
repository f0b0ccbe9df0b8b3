"""The cluster: its profiles, the doctor, rails, the environment of RCCL, and lists of nodes."""
