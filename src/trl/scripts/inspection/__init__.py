"""What `trl inspect` shows of a data set: rows with their trained tokens, lengths, and faults."""
