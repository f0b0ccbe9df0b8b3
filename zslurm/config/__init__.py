"""From a run file, a cluster profile and overrides to one typed, frozen RunSpec, each value with its origin."""
