"""Best-fit packing: whole documents in contexts, none of them cut."""
