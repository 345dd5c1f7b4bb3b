"""The OpenAI-compatible API: schema, endpoints, streams, and its OpenAPI document."""
