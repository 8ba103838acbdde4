"""XTML chats: render conversations to token ids, parse completions back, check chat files (docs/chat.md)."""

from tercet.data.chat.check import Report, check_chat
from tercet.data.chat.deltas import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Completion,
    Delta,
    ParsedCall,
    ReasoningDelta,
    TextDelta,
    merge,
)
from tercet.data.chat.messages import Conversation, ImagePart, Message, ResponseFormat, ToolCall, image_sources
from tercet.data.chat.parse import Parser, TextParser, parse
from tercet.data.chat.render import Encoded, ImageSize, Prompt, Segment, check_feature_rows, encode, render
from tercet.data.chat.schema import Problem, conversation_from, read_conversation

__all__ = [
    "ArgumentsDelta",
    "CallEnd",
    "CallStart",
    "Completion",
    "Conversation",
    "Delta",
    "Encoded",
    "ImagePart",
    "ImageSize",
    "Message",
    "ParsedCall",
    "Parser",
    "Problem",
    "Prompt",
    "ReasoningDelta",
    "Report",
    "ResponseFormat",
    "Segment",
    "TextDelta",
    "TextParser",
    "ToolCall",
    "check_chat",
    "check_feature_rows",
    "conversation_from",
    "encode",
    "image_sources",
    "merge",
    "parse",
    "read_conversation",
    "render",
]
