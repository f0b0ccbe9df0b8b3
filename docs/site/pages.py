"""In which section of the site each page is."""

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Start", ("install.md", "start-laptop.md", "start-slurm.md", "finetune.md", "concepts.md")),
    (
        "Runs",
        (
            "configuration.md",
            "submit.md",
            "programs.md",
            "submitit.md",
            "python.md",
            "continue.md",
            "everyday.md",
            "metrics.md",
            "trackers.md",
            "report.md",
            "run-directory.md",
            "templates.md",
            "containers.md",
        ),
    ),
    (
        "Plan and measure",
        (
            "plan.md",
            "size.md",
            "tune.md",
            "measured.md",
            "bench.md",
            "bench-gpus.md",
            "bench-storage.md",
        ),
    ),
    (
        "Fault tolerance",
        ("aegis.md", "policy.md", "recovery.md", "integrity.md", "classify.md", "troubleshooting.md"),
    ),
    ("Clusters", ("bring-up.md", "zaya1-8b.md", "clusters.md", "doctor.md", "rails.md", "rccl.md")),
    ("Training", ("model.md", "training.md", "context.md", "data.md", "mixtures.md", "kernels.md")),
    ("Checkpoints", ("checkpoints.md", "interop.md", "evaluation.md")),
    (
        "Reference",
        ("reference/commands.md", "reference/configuration.md", "reference/events.md", "reference/python.md"),
    ),
    (
        "Development",
        (
            "architecture.md",
            "glossary.md",
            "verified.md",
            "performance.md",
            "comparison.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
        ),
    ),
)
