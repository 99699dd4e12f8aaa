"""Known import paths; these modules only re-export."""
