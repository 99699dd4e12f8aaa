"""The mathematics of training methods, without trainers."""
