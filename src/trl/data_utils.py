"""The dataset functions at their known import path; the code lives in `trl.data`."""

from trl.data.formats import extract_prompt as extract_prompt
from trl.data.formats import is_conversational as is_conversational
from trl.data.formats import is_conversational_from_value as is_conversational_from_value
from trl.data.formats import maybe_convert_to_chatml as maybe_convert_to_chatml
from trl.data.formats import maybe_extract_prompt as maybe_extract_prompt
from trl.data.formats import maybe_unpair_preference_dataset as maybe_unpair_preference_dataset
from trl.data.formats import unpair_preference_dataset as unpair_preference_dataset
from trl.data.multimodal import prepare_multimodal_messages as prepare_multimodal_messages
from trl.data.multimodal import prepare_multimodal_messages_vllm as prepare_multimodal_messages_vllm
from trl.data.packing import pack_dataset as pack_dataset
from trl.data.templates import apply_chat_template as apply_chat_template
from trl.data.templates import maybe_apply_chat_template as maybe_apply_chat_template
from trl.data.truncation import truncate_dataset as truncate_dataset
