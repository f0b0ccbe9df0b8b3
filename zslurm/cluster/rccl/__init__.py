"""The RCCL and NCCL environment: rules, variables, lint."""
