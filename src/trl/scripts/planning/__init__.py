"""`trl plan`: the memory of a run, from the model's config alone."""
