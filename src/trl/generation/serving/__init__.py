"""The HTTP server of `trl vllm-serve`, connections to it, and the weight channel."""
