"""The format as data: names on disk, manifest, safetensors headers, and who owns what; no file is opened here."""
