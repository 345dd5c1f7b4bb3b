"""The way between a front end and its engine: client, transport, frames, heartbeat."""
