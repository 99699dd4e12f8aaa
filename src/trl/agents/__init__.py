"""Agents and tools: from chats over several turns to experience."""
