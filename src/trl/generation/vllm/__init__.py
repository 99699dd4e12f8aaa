"""vLLM: engines, the client and what runs in its server."""
