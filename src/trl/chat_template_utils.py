"""The chat template functions at their known import path; the code lives in `trl.data.templates`."""

from trl.data.templates import add_response_schema as add_response_schema
from trl.data.templates import get_training_chat_template as get_training_chat_template
from trl.data.templates import is_chat_template_prefix_preserving as is_chat_template_prefix_preserving
from trl.data.templates import parse_response as parse_response
