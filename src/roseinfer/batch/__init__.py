"""`roseinfer batch`: answers the lines of OpenAI's batch files, without HTTP and as fast as the engine goes."""
