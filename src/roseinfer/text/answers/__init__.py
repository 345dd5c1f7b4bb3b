"""Answers: separates the text of an answer into thoughts, content and tool calls."""
