"""Generation and rewards -> experience: what the online methods train on."""
