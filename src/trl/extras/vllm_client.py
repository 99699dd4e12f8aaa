"""The names known at this import path; the code lives in `trl.generation.vllm_client`."""

from trl.generation.vllm_client import VLLMClient, pil_to_base64

__all__ = ["VLLMClient", "pil_to_base64"]
